"""The sum of two values of the same sizes."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import (
    RELU,
    Layouts,
    Operator,
    Recognised,
    Recogniser,
    Tensors,
    finish,
    unpermuted,
)
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.pointwise_lowering import lower_expression
from escalade.engine.nodes.signature import ANY, FLAG, Signature
from escalade.ops.add import ADD, AddProblem
from escalade.ops.expressions import Expression


class Add(Operator):
    """y = x + residual, then ReLU."""

    name = "add"
    signature = Signature({"x": ANY, "residual": ANY}, {"relu": FLAG}, floating=False)
    is_addition = True

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {"add": self._recognise}

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        x, other = call.value("self"), call.value("other")
        if x is None or other is None or call("alpha", 1) != 1:
            return None
        for value in (x, other):
            if graph.shape_of(value) != node.shape:
                return None
            if graph.dtype_of(value).is_floating_point != node.is_floating:
                return None
        return self.instead_of(node, {"x": x, "residual": other}, relu=False)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return finish(node, inputs["x"], inputs)

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts.of_all(given)

    def before_permute(self, node: Node, order: tuple[int, ...], graph: Graph) -> Node | None:
        return unpermuted(node, order)

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        terms = [node.inputs[role] for role in ("x", "residual")]
        form = forms.value(node.name)
        if any(forms.is_constant(name) or forms.value(name) != form for name in terms):
            return lower_expression(node, self.expression(node), forms)
        problem = AddProblem(prod(form.shape), node.attributes["relu"], forms.stored)
        return Lowered(ADD, problem, in_place="x")

    def expression(self, node: Node) -> Expression:
        return Expression.parse("relu(x + residual)" if node.attributes["relu"] else "x + residual")

    def takes(self, node: Node, expression: Expression) -> bool:
        return expression == RELU  # which its kernels have a flag for
