"""The gradient of what the mean of each window was taken of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import Layouts, Operator, Recognised, Recogniser, Tensors
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.windows import windows_of
from escalade.ops.avg_pool2d import AvgPool2dProblem
from escalade.ops.avg_pool2d_backward import AVG_POOL2D_BACKWARD, AvgPool2dBackwardProblem


class AvgPool2dBackward(Operator):
    """dx of y = avg_pool2d(x), from the gradient of y."""

    name = "avg_pool2d_backward"
    computes_in_fp32 = True
    values = ("gradient",)

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {"avg_pool2d_backward": self._recognise, "_adaptive_avg_pool2d_backward": self._adaptive}

    def _recognise(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        gradient, divisor = call.value("grad_output"), call("divisor_override")
        if gradient is None or len(node.shape) != 4 or (divisor is not None and divisor < 1):
            return None
        return self.instead_of(
            node, {"gradient": gradient}, **windows_of(call),
            count_padding=bool(call("count_include_pad", True)), divisor=divisor or 0,
        )  # fmt: skip

    def _adaptive(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        """Where the windows divide the image evenly."""
        gradient = call.value("grad_output")
        if gradient is None or len(node.shape) != 4:
            return None
        sizes = list(zip(node.shape[2:], graph.shape_of(gradient)[2:], strict=True))
        if not all(isinstance(size, int) and isinstance(out, int) and size % out == 0 for size, out in sizes):
            return None
        window = tuple(size // out for size, out in sizes)  # type: ignore[operator]
        return self.instead_of(
            node, {"gradient": gradient},
            kernel=window, stride=window, padding=(0, 0), ceil_mode=False, count_padding=True, divisor=0,
        )  # fmt: skip

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a, gradient = node.attributes, inputs["gradient"]
        x = gradient.new_empty(node.shape)  # type: ignore[arg-type]  # of which only the sizes are looked at
        backward: Any = torch.ops.aten.avg_pool2d_backward
        result: torch.Tensor = backward(
            gradient, x, a["kernel"], a["stride"], a["padding"], a["ceil_mode"], a["count_padding"],
            a["divisor"] or None,
        )  # fmt: skip
        return result

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts.of_all(given)

    def lower(self, node: Node, forms: Forms) -> Lowered:
        a, form = node.attributes, forms.value(node.name)
        batch, channels, height, width = form.shape
        forward = AvgPool2dProblem(
            batch, channels, height, width, a["kernel"], a["stride"], a["padding"], a["ceil_mode"], forms.stored,
            form.layout, count_padding=a["count_padding"], divisor=a["divisor"],
        )  # fmt: skip
        return Lowered(AVG_POOL2D_BACKWARD, AvgPool2dBackwardProblem(forward))
