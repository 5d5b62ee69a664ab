"""The Gaussian error linear unit, exact or approximated by tanh."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import Layouts, Operator, Recognised, Recogniser, Tensors, unpermuted
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.pointwise_lowering import lower_expression
from escalade.engine.nodes.signature import ANY, Attribute, Signature
from escalade.ops.expressions import Expression

_NAMES = {"none": "gelu", "tanh": "gelu_tanh"}
"""What expressions call it, by PyTorch's name for the approximation."""


class Gelu(Operator):
    """y = x Φ(x); chains of linear layers take it into their kernels."""

    name = "gelu"
    signature = Signature(
        {"x": ANY}, {"approximate": Attribute("none or tanh", lambda value: value in ("none", "tanh"))}
    )

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {"gelu": self._recognise}

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        return self.instead_of(node, {"x": call.value("self")}, approximate=call("approximate", "none"))

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return F.gelu(inputs["x"], approximate=node.attributes["approximate"])

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts.of_all(given)

    def before_permute(self, node: Node, order: tuple[int, ...], graph: Graph) -> Node | None:
        return unpermuted(node, order)

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        return lower_expression(node, self.expression(node), forms)

    def expression(self, node: Node) -> Expression:
        return Expression.apply(_NAMES[node.attributes["approximate"]], "x")
