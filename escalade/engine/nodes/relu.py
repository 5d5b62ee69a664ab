"""The rectifier, also with an upper limit (ReLU6)."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import (
    Layouts,
    Operator,
    Recognised,
    Recogniser,
    Tensors,
    unpermuted,
    with_channels,
)
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.signature import ANY, Attribute, Signature, is_real
from escalade.ops.expressions import Expression
from escalade.ops.relu import RELU, ReluProblem

_LIMIT = Attribute(
    "a positive number or nothing", lambda value: value is None or (is_real(value) and value > 0)
)


class Relu(Operator):
    """y = max(x, 0), or min(max(x, 0), limit)."""

    name = "relu"
    signature = Signature({"x": ANY}, {"limit": _LIMIT}, floating=False)

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {"relu": self._unlimited, "relu6": self._six, "hardtanh": self._hardtanh}

    def _unlimited(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        return self.instead_of(node, {"x": call.value("self")}, limit=None)

    def _six(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        return self.instead_of(node, {"x": call.value("self")}, limit=6.0)

    def _hardtanh(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        low, high = call("min_val", -1), call("max_val", 1)
        if low != 0 or not high > 0:
            return None
        return self.instead_of(node, {"x": call.value("self")}, limit=float(high))

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        limit = node.attributes["limit"]
        return torch.relu(inputs["x"]) if limit is None else inputs["x"].clamp(0, limit)

    def before_channels(self, node: Node, order: tuple[int, ...], channels: int, graph: Graph) -> Node | None:
        return with_channels(node, channels)

    def lower(self, node: Node, forms: Forms) -> Lowered:
        problem = ReluProblem(prod(forms.value(node.name).shape), node.attributes["limit"], forms.stored)
        return Lowered(RELU, problem, in_place="x")

    def expression(self, node: Node) -> Expression:
        limit = node.attributes["limit"]
        return Expression.parse("relu(x)" if limit is None else f"clamp(x, 0, {limit!r})")

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts.of_all(given)

    def before_permute(self, node: Node, order: tuple[int, ...], graph: Graph) -> Node | None:
        return unpermuted(node, order)
