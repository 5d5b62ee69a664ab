"""Losses together with the gradients of their operands, for training steps; created by passes."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.engine.graph.graph import Node
from escalade.engine.nodes.base import Layouts, Operator, Tensors
from escalade.engine.nodes.lowering import FP32, Forms, Lowered, problem_from
from escalade.ops.base.dtypes import NAMES
from escalade.ops.cross_entropy import CROSS_ENTROPY, CrossEntropyProblem
from escalade.ops.expressions import Expression
from escalade.ops.pointwise_loss import POINTWISE_LOSS, PointwiseLossProblem

LOSS = "loss"
"""Buffer of the loss, a side output of the gradient."""


class CrossEntropy(Operator):
    """scale * d loss / dx of loss = mean or sum of -log softmax(x)[target] over rows; the loss is a side output.

    Rows of images are their pixels, which are contiguous in NHWC.
    """

    name = "cross_entropy"
    values = ("x", "target", "scale")
    mixes_types = True

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        with torch.enable_grad():
            x = inputs["x"].detach().requires_grad_()
            loss = _cross_entropy(node, x, inputs["target"])
            (gradient,) = torch.autograd.grad(loss, x, inputs["scale"].reshape(()))
        return gradient

    def side_outputs(self, node: Node, inputs: Tensors) -> Tensors:
        return {LOSS: _cross_entropy(node, inputs["x"], inputs["target"])}

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts("nhwc", "nhwc") if "x" in given else Layouts("nchw", "nchw")

    def lower(self, node: Node, forms: Forms) -> Lowered:
        images, classes, *pixels = forms.value(node.name).shape
        problem = problem_from(
            CrossEntropyProblem, node,
            batch=images * math.prod(pixels), classes=classes, gradient=True, dtype=forms.stored,
        )  # fmt: skip
        return Lowered(CROSS_ENTROPY, problem, {"scale": FP32})


def _cross_entropy(node: Node, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    wide = x if x.dtype == torch.float64 else x.float()
    a = node.attributes
    return F.cross_entropy(wide, target, reduction=a["reduction"], ignore_index=a["ignored"])


class PointwiseLoss(Operator):
    """scale * d loss / dx of loss = mean or sum of a function of x and target; the loss is a side output."""

    name = "pointwise_loss"
    preferred_layout = None
    values = ("x", "target", "scale")
    mixes_types = True

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        _, derivatives = _terms_and_derivatives(node, inputs)
        is_mean = node.attributes["reduction"] == "mean"
        factor = 1 / math.prod(node.shape) if is_mean else 1.0  # type: ignore[arg-type]
        return (derivatives * (inputs["scale"] * factor)).to(inputs["x"].dtype)

    def side_outputs(self, node: Node, inputs: Tensors) -> Tensors:
        terms, _ = _terms_and_derivatives(node, inputs)
        return {LOSS: terms.mean() if node.attributes["reduction"] == "mean" else terms.sum()}

    def lower(self, node: Node, forms: Forms) -> Lowered:
        target = NAMES[forms.value(node.inputs["target"]).dtype]
        problem = problem_from(
            PointwiseLossProblem, node,
            elements=math.prod(forms.value(node.name).shape), gradient=True, dtype=forms.stored,
            target="" if target == forms.stored else target,
        )  # fmt: skip
        return Lowered(POINTWISE_LOSS, problem, {"scale": FP32})


def _terms_and_derivatives(node: Node, inputs: Tensors) -> tuple[torch.Tensor, ...]:
    """Compute in fp32 at least."""
    wide = torch.promote_types(torch.promote_types(inputs["x"].dtype, inputs["target"].dtype), torch.float32)
    expression = Expression.parse(node.attributes["expression"])
    return expression.evaluate({role: inputs[role].to(wide) for role in expression.inputs})
