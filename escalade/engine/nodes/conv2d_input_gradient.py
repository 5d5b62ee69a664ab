"""The gradient of what a convolution reads, also where that came out of a ReLU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import Operator, Recognised, Recogniser, Tensors
from escalade.engine.nodes.conv2d_weight_gradient import Conv2dWeightGradient
from escalade.engine.nodes.gradients import convolution_of, through_relu
from escalade.engine.nodes.lowering import NHWC, Forms, Lowered
from escalade.engine.nodes.reduce import Reduce
from escalade.ops.conv2d_input_gradient import CONV2D_INPUT_GRADIENT, Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.op import is_worthwhile, supports_groups


class Conv2dInputGradient(Operator):
    """dx of y = conv(x, weight), from the gradient of y; zero where a `mask`, a ReLU's result, is not positive, or with
    the gradient that x has from elsewhere added, a `residual`."""

    name = "conv2d_input_gradient"
    values = ("gradient", "mask", "residual")

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {"convolution_backward": self._recognise}

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
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
            node, {"x": gradient}, kind="sum", dims=(0, 2, 3), keepdim=False, correction=0, relu=False
        )

    def fuse_step(self, graph: Graph) -> None:
        """Takes the backward pass of a ReLU in front of the convolution."""
        for node in graph:
            is_free = self.matches(node) and not {"mask", "residual"} & node.inputs.keys()
            found = through_relu(node, graph) if is_free else None
            if found is not None:
                behind, mask = found
                graph.nodes[behind.name] = replace(node.with_inputs(mask=mask), name=behind.name)
                del graph.nodes[node.name]

    def takes_residual(self, node: Node) -> bool:
        return True

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a, gradient = node.attributes, inputs["gradient"]
        x = gradient.new_empty(node.shape)  # type: ignore[arg-type]  # of which only the sizes are looked at
        backward: Any = torch.ops.aten.convolution_backward
        dx: torch.Tensor = backward(
            gradient, x, inputs["weight"], None, a["stride"], a["padding"], a["dilation"], False, [0, 0], a["groups"],
            [True, False, False],
        )[0]  # fmt: skip
        if "residual" in inputs:
            return dx + inputs["residual"]
        return torch.where(inputs["mask"] <= 0, 0.0, dx) if "mask" in inputs else dx

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        a = node.attributes
        forward = convolution_of(
            node, forms.value(node.name).shape, forms.sizes(node.inputs["weight"]), forms.dtype,
            residual="residual" in node.inputs,
        )  # fmt: skip
        problem = Conv2dInputGradientProblem(forward, mask="mask" in node.inputs)
        if not is_worthwhile(a["stride"], a["groups"]) and not supports_groups(problem):
            return None
        return Lowered(CONV2D_INPUT_GRADIENT, problem, {"weight": NHWC})

    def constants_in_pytorch(self, node: Node) -> Mapping[str, str]:
        return {"weight": NHWC}
