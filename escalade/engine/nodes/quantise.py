"""A value in FP8 for the convolutions that read it so; made by the pass of the same name."""

from __future__ import annotations

from math import prod

import torch

from escalade.engine.graph.forms import NAMES
from escalade.engine.graph.graph import Node
from escalade.engine.nodes.base import Operator, Tensors
from escalade.engine.nodes.lowering import FP32, Forms, Lowered
from escalade.ops.quantise import QUANTISE, QuantiseProblem


class Quantise(Operator):
    """y = x * factor, stored as e4m3."""

    name = "quantise"

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return inputs["x"] * inputs["factor"]

    def lower(self, node: Node, forms: Forms) -> Lowered:
        form = forms.value(node.inputs["x"])
        return Lowered(QUANTISE, QuantiseProblem(prod(form.shape), NAMES[form.dtype]), {"factor": FP32})
