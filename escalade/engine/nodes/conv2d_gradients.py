"""Gradients of convolutions by their input, weight and bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.base import AtenCall, Match, Operator, Tensors, match_aten
from escalade.engine.nodes.conv2d import filter_problem
from escalade.engine.nodes.lowering import NHWC, Forms, Lowered
from escalade.engine.nodes.reduce import Reduce
from escalade.ops.conv2d import Conv2dProblem
from escalade.ops.conv2d_input_gradient import CONV2D_INPUT_GRADIENT, Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.op import is_worthwhile, supports_groups
from escalade.ops.conv2d_weight_gradient import CONV2D_WEIGHT_GRADIENT, Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.rungs.depthwise import DEPTHWISE

BIAS_GRADIENT = "bias_gradient"
"""Buffer of the bias gradient, a side output of the weight gradient."""
BIAS_DIMS = (0, 2, 3)
"""Dimensions that the gradient of a bias is summed over."""


def _convolution_backward(
    node: Node, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, result: int
) -> torch.Tensor:
    a = node.attributes
    backward: Any = torch.ops.aten.convolution_backward
    found: torch.Tensor = backward(
        gradient, x, weight, None, a["stride"], a["padding"], a["dilation"], False, [0, 0], a["groups"],
        [index == result for index in range(3)],
    )[result]  # fmt: skip
    return found


class Conv2dInputGradient(Operator):
    """dx of y = conv(x, weight), from the gradient of y.

    Zero where `mask`, the result of a ReLU, is not positive; or plus `residual`, the gradient of other uses of x.
    """

    name = "conv2d_input_gradient"
    values = ("gradient", "mask", "residual")

    @match_aten("convolution_backward")
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        gradient, x, weight = (call.value(role) for role in ("grad_output", "input", "weight"))
        if gradient is None or x is None or weight is None or call("transposed", False):
            return None
        if len(graph.shape_of(x)) != 4 or not node.is_floating:
            return None
        window = {
            "stride": call.pair("stride", 1), "padding": call.pair("padding", 0), "dilation": call.pair("dilation", 1),
            "groups": call("groups", 1),
        }  # fmt: skip
        match node.attributes["result"]:
            case 0:
                return self.instead_of(node, {"gradient": gradient, "weight": weight}, **window)
            case 1:
                inputs = {"x": x, "gradient": gradient}
                return Conv2dWeightGradient.instead_of(node, inputs, **window, bias=False)
        return Reduce.instead_of(
            node, {"x": gradient}, kind="sum", dims=BIAS_DIMS, keepdim=False, correction=0, relu=False
        )

    def takes_residual(self, node: Node) -> bool:
        return True

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        gradient = inputs["gradient"]
        x = gradient.new_empty(node.shape)  # type: ignore[arg-type]  # only its shape is used
        dx = _convolution_backward(node, gradient, x, inputs["weight"], 0)
        if "residual" in inputs:
            return dx + inputs["residual"]
        return torch.where(inputs["mask"] <= 0, 0.0, dx) if "mask" in inputs else dx

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        a, filters = node.attributes, forms.sizes(node.inputs["weight"])
        image = forms.value(node.name).shape
        forward = filter_problem(Conv2dProblem, node, image, filters, dtype=forms.dtype)
        problem = Conv2dInputGradientProblem(forward, mask="mask" in node.inputs)
        if not is_worthwhile(a["stride"], a["groups"]) and not supports_groups(problem):
            return None
        return Lowered(CONV2D_INPUT_GRADIENT, problem, {"weight": NHWC})

    def pytorch_constants(self, node: Node) -> Mapping[str, str]:
        return {"weight": NHWC}


class Conv2dWeightGradient(Operator):
    """dw of y = conv(x, w), from x and the gradient of y; with `bias`, the gradient of the bias is a side output."""

    name = "conv2d_weight_gradient"
    values = ("x", "gradient")

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        x, gradient = inputs["x"], inputs["gradient"]
        weight = x.new_empty(node.shape)  # type: ignore[arg-type]  # only its shape is used
        return _convolution_backward(node, gradient, x, weight, 1)

    def side_outputs(self, node: Node, inputs: Tensors) -> Tensors:
        return {BIAS_GRADIENT: inputs["gradient"].sum(BIAS_DIMS).view(node.shape)}  # type: ignore[arg-type]

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        image, filters = forms.value(node.inputs["x"]).shape, forms.value(node.name).shape
        forward = filter_problem(Conv2dProblem, node, image, filters, dtype=forms.stored)
        problem = Conv2dWeightGradientProblem(forward)
        if node.attributes["groups"] != 1 and DEPTHWISE.supports(problem):
            return None  # only the naive rung supports other groups
        return Lowered(CONV2D_WEIGHT_GRADIENT, problem)
