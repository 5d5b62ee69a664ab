"""A tensor's elements with other sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall, converts
from escalade.engine.nodes.base import (
    ROWS_OF_LAST,
    Layouts,
    Operator,
    Recognised,
    Recogniser,
    Tensors,
    with_channels,
)
from escalade.engine.nodes.signature import ANY, RESULT, Attributes, Signature, SizeError, Sizes


class Reshape(Operator):
    """A tensor's bytes, seen differently; passes see to it that they lie in PyTorch's order, or need not."""

    name = "reshape"
    signature = Signature({"x": ANY}, {}, floating=False)
    is_view = True

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        names = ("flatten", "unflatten", "view", "reshape", "squeeze", "unsqueeze", "_unsafe_view")
        return dict.fromkeys(names, self._recognise)

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        x = call.value("self") or call.value("input")
        assert x is not None
        if converts(call, x, graph):
            return None  # the same bytes as numbers of another type
        if graph.shape_of(x) == node.shape:
            return x
        return self.instead_of(node, {"x": x})

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts("nhwc", "nchw") if node.attributes.get("order") == "nhwc" else ROWS_OF_LAST

    def before_channels(self, node: Node, order: tuple[int, ...], channels: int, graph: Graph) -> Node | None:
        """The channels of one pixel are features."""
        image = graph.shape_of(node.inputs["x"])
        if len(image) != 4 or image[2:] != (1, 1) or node.shape != image[:2]:
            return None
        return with_channels(node, channels)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        x = inputs["x"]
        if node.attributes.get("order") == "nhwc":
            x = x.permute(0, 2, 3, 1)
        return x.reshape(node.shape)  # type: ignore[arg-type]

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        if math.prod(sizes["x"]) != math.prod(sizes[RESULT]):
            raise SizeError(
                f"{list(sizes['x'])} and {list(sizes[RESULT])} have different numbers of elements"
            )
        return {}
