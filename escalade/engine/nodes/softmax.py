"""Softmax over the last dimension."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import ROWS_OF_LAST, Layouts, Operator, Recognised, Recogniser, Tensors
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.signature import ROWS, Signature
from escalade.ops.softmax import SOFTMAX, SoftmaxProblem


class Softmax(Operator):
    """Each row's exponentials, divided by their sum."""

    name = "softmax"
    signature = Signature({"x": ROWS}, {})

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {"softmax": self._recognise, "_softmax": self._recognise}

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        if call("dim") not in (-1, len(node.shape) - 1) or call("dtype") is not None:
            return None
        return self.instead_of(node, {"x": call.value("self")})

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return torch.softmax(inputs["x"], -1)

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return ROWS_OF_LAST

    def lower(self, node: Node, forms: Forms) -> Lowered:
        form = forms.value(node.name)
        return Lowered(SOFTMAX, SoftmaxProblem(prod(form.shape[:-1]), form.shape[-1], forms.stored))
