"""The gradient of a convolution's weights, and beside it that of its bias."""

from __future__ import annotations

from typing import Any

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.base import Operator, Tensors
from escalade.engine.nodes.gradients import convolution_of, put_in_order
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.reduce import Reduce
from escalade.engine.nodes.reshape import Reshape
from escalade.engine.nodes.side_outputs import Further, put_beside
from escalade.ops.conv2d_weight_gradient import CONV2D_WEIGHT_GRADIENT, Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.rungs.depthwise import DEPTHWISE

_BIAS = "bias_gradient"
_BY_FILTER = (0, 2, 3)
"""The dimensions that a bias is the same for."""


class Conv2dWeightGradient(Operator):
    """dw of y = conv(x, w), from x and the gradient of y."""

    name = "conv2d_weight_gradient"
    values = ("x", "gradient")

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a, x, gradient = node.attributes, inputs["x"], inputs["gradient"]
        weight = x.new_empty(node.shape)  # type: ignore[arg-type]  # of which only the sizes are looked at
        backward: Any = torch.ops.aten.convolution_backward
        result: torch.Tensor = backward(
            gradient, x, weight, None, a["stride"], a["padding"], a["dilation"], False, [0, 0], a["groups"],
            [False, True, False],
        )[1]  # fmt: skip
        return result

    def further(self, node: Node, inputs: Tensors) -> Tensors:
        return {_BIAS: inputs["gradient"].sum(_BY_FILTER).view(node.shape)}  # type: ignore[arg-type]

    def fuse_step(self, graph: Graph) -> None:
        """Takes the sums of the same gradient by filter, which its kernels read anyway."""
        found = False
        for node in graph:
            if not self.matches(node) or node.attributes["bias"]:
                continue
            total = next(
                (other for other in graph if _is_bias_gradient(other, node.inputs["gradient"], graph)), None
            )
            if total is None or total.dtype != node.dtype:
                continue
            maker = node.with_attributes(bias=True)
            put_beside(graph, maker, Further.of(maker, total.name, _BIAS, total.shape, total.dtype))
            found = True
        if found:
            put_in_order(graph)

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        a = node.attributes
        image, filters = forms.value(node.inputs["x"]).shape, forms.value(node.name).shape
        forward = convolution_of(node, image, filters, forms.stored, a["bias"])
        problem = Conv2dWeightGradientProblem(forward)
        if a["groups"] != 1 and DEPTHWISE.supports(problem):
            return None  # there is nothing but the foot of the ladder
        return Lowered(CONV2D_WEIGHT_GRADIENT, problem)


def _is_bias_gradient(node: Node, gradient: str, graph: Graph) -> bool:
    """Whether a node is the sum of a gradient over all but its channels, or of the rows that it has the pixels of."""
    if not Reduce.matches(node):
        return False
    a, image = node.attributes, graph.nodes.get(gradient)
    of_rows = (
        Reshape.matches(image)
        and node.inputs["x"] == image.inputs["x"]
        and len(graph.shape_of(node.inputs["x"])) == 2
    )
    return (
        (of_rows or node.inputs["x"] == gradient)
        and (a["kind"], a["dims"]) == ("sum", (0,) if of_rows else _BY_FILTER)
        and "before" not in a
        and Reduce().applied(node).is_identity
    )
