"""The gradient of an image that was brought to another size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import Operator, Recognised, Recogniser, Tensors
from escalade.engine.nodes.conv2d import Conv2d
from escalade.engine.nodes.conv2d_input_gradient import Conv2dInputGradient
from escalade.engine.nodes.gradients import put_in_order, through_relu
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.repeated import TWICE, around, is_dense, is_repeated, summed
from escalade.engine.nodes.upsample2d import MODE_OF, needed_factors
from escalade.ops.expressions import Expression
from escalade.ops.upsample2d import Upsample2dProblem
from escalade.ops.upsample2d import gradient as of_input
from escalade.ops.upsample2d_backward import UPSAMPLE2D_BACKWARD, Upsample2dBackwardProblem

_MASKED = Expression.parse("where(residual <= 0, 0, x)")
"""The backward pass of a ReLU whose result is the residual."""


class Upsample2dBackward(Operator):
    """dx of y = upsample2d(x), from the gradient of y."""

    name = "upsample2d_backward"
    computes_in_fp32 = True
    values = ("gradient",)

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {f"{name}_backward": partial(self._recognise, mode) for name, mode in MODE_OF.items()}

    def _recognise(self, mode: str, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        gradient = call.value("grad_output")
        if gradient is None or not node.is_floating:
            return None
        corners = bool(call("align_corners", False))
        output = graph.shape_of(gradient)[2:]
        factors = needed_factors(node.shape[2:], output, corners, (call("scales_h"), call("scales_w")))
        return self.instead_of(
            node, {"gradient": gradient}, output=output, mode=mode, corners=corners, factors=factors
        )

    def fuse_step(self, graph: Graph) -> None:
        """Takes the gradient of a convolution's input in front of it, and a ReLU's backward pass behind it: all that is
        one convolution where pixels were repeated."""
        for node in graph:
            large = graph.nodes.get(node.inputs["gradient"]) if self.matches(node) else None
            if not Conv2dInputGradient.matches(large) or graph.only_user(large.name) is not node:
                continue
            weight = large.inputs["weight"]
            filters = graph.shape_of(weight)
            if not is_repeated(node.attributes, node.shape) or not is_dense(large, filters):
                continue
            if weight in graph.constants or "mask" in large.inputs:
                continue
            behind = through_relu(node, graph)
            place, mask = behind if behind is not None else (node, None)
            small = Conv2d.instead_of(
                replace(place, source=node.source),
                {"x": large.inputs["gradient"], "weight": summed(weight, graph), "residual": mask},
                stride=TWICE, padding=around(large, filters), dilation=(1, 1), groups=1, relu=False,
            )  # fmt: skip
            graph.nodes[place.name] = Conv2d().applying(small, _MASKED) if mask else small
            for gone in {large.name, node.name} - {place.name}:
                del graph.nodes[gone]
            put_in_order(graph)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        return of_input(inputs["gradient"], torch.Size(node.shape), a["mode"], a["corners"], a["factors"])  # type: ignore[arg-type]

    def lower(self, node: Node, forms: Forms) -> Lowered:
        a = node.attributes
        batch, channels, height, width = forms.value(node.name).shape
        forward = Upsample2dProblem(
            batch, channels, height, width, a["output"], a["mode"], a["corners"], a["factors"], forms.stored, "nhwc"
        )  # fmt: skip
        return Lowered(UPSAMPLE2D_BACKWARD, Upsample2dBackwardProblem(forward))
