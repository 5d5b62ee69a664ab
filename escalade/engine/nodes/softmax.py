"""Softmax over the last dimension, or over the channels of an image, which any other dimension can be."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from escalade.engine.graph.graph import Batch, Graph, Node, Shape
from escalade.engine.nodes.aten_call import AtenCall, converts
from escalade.engine.nodes.base import (
    ROWS_OF_LAST,
    Layouts,
    Operator,
    Recognised,
    Recogniser,
    Tensors,
    unpermuted,
)
from escalade.engine.nodes.channels import channels_as_they_lie, side_by_side
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.permute import CHANNELS_LAST
from escalade.engine.nodes.reshape import Reshape
from escalade.engine.nodes.signature import FLAG, ROWS, Attributes, Signature, SizeError, Sizes
from escalade.ops.softmax import SOFTMAX, SoftmaxProblem


def _times(sizes: Shape) -> int | Batch:
    """The product of sizes, of which the first may grow with the batch."""
    first, *others = sizes or (1,)
    number = prod(others)  # type: ignore[arg-type]
    return Batch(first.times * number) if isinstance(first, Batch) else first * number


class Softmax(Operator):
    """Each row's exponentials, divided by their sum."""

    name = "softmax"
    signature = Signature({"x": ROWS}, {"of_channels": FLAG})

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {"softmax": self._recognise, "_softmax": self._recognise}

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        x, rank, at = call.value("self"), len(node.shape), call("dim")
        if x is None or converts(call, x, graph) or not rank or not isinstance(at, int):
            return None
        at %= rank
        of_channels = rank == 4 and at == 1
        if of_channels or at == rank - 1:
            return self.instead_of(node, {"x": x}, of_channels=of_channels)
        return self._within(node, x, at, graph)

    def _within(self, node: Node, x: str, at: int, graph: Graph) -> Recognised:
        """Over a dimension with others behind it: over the channels of images one column wide."""
        front, classes, behind = node.shape[:at], node.shape[at], node.shape[at + 1 :]
        if not all(isinstance(size, int) for size in (classes, *front[1:], *behind)):
            return None
        images = (_times(front), classes, prod(behind), 1)  # type: ignore[arg-type]
        seen = Reshape.node(graph.fresh(f"{node.name}_image"), {"x": x}, {}, images, node.dtype)
        graph.append(seen)
        made = self.node(
            graph.fresh(f"{node.name}_of_channels"),
            {"x": seen.name},
            {"of_channels": True},
            images,
            node.dtype,
        )
        graph.append(made)
        return Reshape.instead_of(node, {"x": made.name})

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return torch.softmax(inputs["x"], 1 if node.attributes["of_channels"] else -1)

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        if attributes["of_channels"] and len(sizes["x"]) != 4:
            raise SizeError("an image has four dimensions")
        return super().sizes(sizes, attributes)

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        if not node.attributes["of_channels"]:
            return ROWS_OF_LAST
        return channels_as_they_lie(node, given)

    def before_permute(self, node: Node, order: tuple[int, ...], graph: Graph) -> Node | None:
        """Rows of channels of an image are its pixels."""
        if node.attributes["of_channels"] or order != CHANNELS_LAST:
            return None
        return unpermuted(node, order).with_attributes(of_channels=True)

    def lower(self, node: Node, forms: Forms) -> Lowered:
        form = forms.value(node.name)
        classes = form.shape[1 if node.attributes["of_channels"] else -1]
        inner = side_by_side(node, form)
        batch = prod(form.shape) // max(1, classes * inner)
        return Lowered(SOFTMAX, SoftmaxProblem(batch, classes, forms.stored, inner=inner))
