"""Filters summed up over windows of two by two taps, turned around, channels in the place of filters."""

from __future__ import annotations

import torch

from escalade.engine.graph.graph import Node
from escalade.engine.nodes.base import Operator, Tensors
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.ops.filter_sums import FILTER_SUMS, FilterSumsProblem, summed


class FilterSums(Operator):
    """What filters over repeated pixels are over the pixels themselves; without `zeros` around them, the gradient of
    filters of that of such sums."""

    name = "filter_sums"

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return summed(inputs["x"], node.attributes["zeros"])

    def lower(self, node: Node, forms: Forms) -> Lowered:
        filters, channels, height, width = forms.value(node.inputs["x"]).shape
        problem = FilterSumsProblem(
            filters, channels, height, width, node.attributes["zeros"], forms.stored, "nhwc"
        )
        return Lowered(FILTER_SUMS, problem)
