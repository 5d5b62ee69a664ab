"""Pools over windows of images, and their gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

from escalade.engine.graph.forms import Form
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.base import AtenCall, Layouts, Match, Operator, Tensors, match_aten
from escalade.engine.nodes.lowering import FP32, Forms, Lowered, image_problem
from escalade.engine.nodes.signature import (
    FLAG,
    IMAGE,
    INDEX,
    Signature,
    pair,
)
from escalade.engine.nodes.views import Reshape
from escalade.ops.adaptive_avg_pool2d import ADAPTIVE_AVG_POOL2D, AdaptiveAvgPool2dProblem
from escalade.ops.avg_pool2d import AVG_POOL2D, AvgPool2dProblem
from escalade.ops.avg_pool2d_backward import AVG_POOL2D_BACKWARD, AvgPool2dBackwardProblem
from escalade.ops.max_pool2d import MAX_POOL2D, MaxPool2dProblem, extra_references
from escalade.ops.max_pool2d_backward import MAX_POOL2D_BACKWARD, MaxPool2dBackwardProblem, from_places
from escalade.ops.reduce import REDUCE, ReduceProblem
from escalade.ops.shared import prologue
from escalade.ops.shared.quantized_input import dequantized

INDICES = "places"
"""Attribute of a max pool that writes its argmax indices, and name of their buffer."""
_LARGE_PLANE = 1024
"""From this many pixels on, the mean of a plane is a row reduction, in which several CTAs can share a plane."""
_WINDOW = {"kernel": pair(1), "stride": pair(1), "padding": pair(0), "ceil_mode": FLAG}


def _window(call: AtenCall) -> dict[str, Any]:
    """Return the window of a PyTorch pool as attributes."""
    kernel = call.pair("kernel_size", 1)
    return {
        "kernel": kernel,
        "stride": call.pair("stride", kernel),
        "padding": call.pair("padding", 0),
        "ceil_mode": bool(call("ceil_mode", False)),
    }


def _dilated_window(call: AtenCall) -> dict[str, Any]:
    return {**_window(call), "dilation": call.pair("dilation", 1)}


class MaxPool2d(Operator):
    """Maximum of each window."""

    name = "max_pool2d"
    preferred_layout = None
    computes_in_fp32 = True
    signature = Signature({"x": IMAGE}, {**_WINDOW, "dilation": pair(1)})

    @match_aten("max_pool2d", "max_pool2d_with_indices")
    @match_aten("max_pool1d", "max_pool1d_with_indices", sequence=("self",))
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        if len(node.shape) != 4 or not _is_values(node):
            return None
        return self.instead_of(node, {"x": call.value("self")}, **_dilated_window(call))

    @match_aten("adaptive_max_pool2d")
    @match_aten("adaptive_max_pool1d", sequence=("self",))
    def _match_adaptive(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        """Match an adaptive pool whose windows have one size and are equally spaced."""
        x = call.value("self")
        if x is None or len(node.shape) != 4 or not _is_values(node):
            return None
        windows = [
            _even_windows(size, outputs)
            for size, outputs in zip(graph.shape_of(x)[2:], node.shape[2:], strict=True)
            if isinstance(size, int) and isinstance(outputs, int)
        ]
        if len(windows) != 2 or None in windows:
            return None
        stride, kernel = zip(*windows, strict=True)
        return self.instead_of(
            node, {"x": x}, kernel=kernel, stride=stride, padding=(0, 0), ceil_mode=False, dilation=(1, 1)
        )

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        window = a["kernel"], a["stride"], a["padding"], a["dilation"], a["ceil_mode"]
        return F.max_pool2d(inputs["x"], *window)

    def side_outputs(self, node: Node, inputs: Tensors) -> Tensors:
        x = inputs["x"]
        form = Form(tuple(x.shape), x.dtype, "nhwc")
        problem = image_problem(MaxPool2dProblem, node, form, "fp32", places=True)
        return {INDICES: extra_references(problem, inputs)[INDICES].to(torch.uint8)}

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts("nhwc", "nhwc") if INDICES in node.attributes else Layouts.common(given)

    def lower(self, node: Node, forms: Forms) -> Lowered:
        problem = image_problem(MaxPool2dProblem, node, forms.value(node.inputs["x"]), forms.stored)
        if INDICES not in node.attributes and _is_global(problem):
            return Lowered(REDUCE, _as_reduction(problem))
        return Lowered(MAX_POOL2D, problem)


def _is_global(p: MaxPool2dProblem) -> bool:
    """Return True for one window over all pixels, which one thread per maximum would read one by one."""
    sizes = zip((p.height, p.width), p.padding, p.kernel, strict=True)
    covers_image = all(size + padding <= kernel for size, padding, kernel in sizes)
    return covers_image and p.dilation == (1, 1) and (p.output_height, p.output_width) == (1, 1)


def _as_reduction(p: MaxPool2dProblem) -> ReduceProblem:
    if p.layout == "nhwc":
        return ReduceProblem("max", p.batch, p.height * p.width, p.channels, dtype=p.dtype)
    return ReduceProblem("max", p.batch * p.channels, p.height * p.width, dtype=p.dtype)


def _is_values(node: Node) -> bool:
    """Return True for the maxima, not their indices."""
    return node.is_floating and node.attributes.get("result", 0) == 0


def _even_windows(size: int, outputs: int) -> tuple[int, int] | None:
    """Return stride and size of PyTorch's adaptive windows, if they are the same for all."""
    windows = [(index * size // outputs, -(-(index + 1) * size // outputs)) for index in range(outputs)]
    widths = {end - first for first, end in windows}
    strides = {after[0] - before[0] for before, after in pairwise(windows)} or {1}
    is_even = len(widths) == len(strides) == 1 and 0 not in strides
    return (strides.pop(), widths.pop()) if is_even else None


class MaxPool2dBackward(Operator):
    """dx of y = max_pool2d(x), from the gradient of y, and x or the argmax indices that the pool wrote.

    With `mask`, x is the result of a ReLU, and dx the gradient of that one's operand.
    """

    name = "max_pool2d_backward"
    values = ("gradient", "x", INDICES)

    @match_aten("max_pool2d_with_indices_backward")
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        """Match if the indices are those of the same pool of x, so that they can be recomputed from x."""
        gradient, x, indices = (call.value(role) for role in ("grad_output", "self", "indices"))
        if gradient is None or x is None or len(node.shape) != 4:
            return None
        window = _dilated_window(call)
        pool = graph.nodes.get(indices or "")
        if pool is None or pool.calls != "max_pool2d_with_indices":
            return None
        forward = AtenCall(pool)
        if forward.value("self") != x or _dilated_window(forward) != window:
            return None
        if pool.attributes.get("result") != 1:
            return None
        return self.instead_of(node, {"gradient": gradient, "x": x}, **window, mask=False)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a, gradient = node.attributes, inputs["gradient"]
        if INDICES in inputs:
            batch, channels, height, width = gradient.new_empty(node.shape).shape  # type: ignore[arg-type]
            pixels, counts = from_places(
                inputs[INDICES], width, a["kernel"], a["stride"], a["padding"], a["dilation"]
            )
            planes = gradient.new_zeros(batch, channels, height * width)
            planes.scatter_add_(2, pixels.flatten(2), torch.where(counts, gradient, 0.0).flatten(2))
            return planes.view(batch, channels, height, width)
        x = inputs["x"]
        aten: Any = torch.ops.aten
        window = a["kernel"], a["stride"], a["padding"], a["dilation"], a["ceil_mode"]
        _, indices = aten.max_pool2d_with_indices(x, *window)
        dx: torch.Tensor = aten.max_pool2d_with_indices_backward(gradient, x, *window, indices)
        return torch.where(x <= 0, 0.0, dx) if a["mask"] else dx

    def lower(self, node: Node, forms: Forms) -> Lowered:
        forward = image_problem(MaxPool2dProblem, node, forms.value(node.name), forms.stored)
        problem = MaxPool2dBackwardProblem(
            forward, mask=node.attributes["mask"], stored=INDICES in node.inputs
        )
        return Lowered(MAX_POOL2D_BACKWARD, problem)


class AvgPool2d(Operator):
    """Sum of each window, divided by its number of pixels, with or without padding, or by a number."""

    name = "avg_pool2d"
    preferred_layout = None
    computes_in_fp32 = True
    signature = Signature({"x": IMAGE}, {**_WINDOW, "count_padding": FLAG, "divisor": INDEX})
    values = (*Operator.values, "gate")

    @match_aten("avg_pool2d")
    @match_aten("avg_pool1d", sequence=("self",))
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        x, window = call.value("self"), _average_window(call)
        if x is None or len(node.shape) != 4 or window is None:
            return None
        is_global = window["kernel"] == graph.shape_of(x)[2:] and window["padding"] == (0, 0)
        if is_global and not window["divisor"]:
            return AdaptiveAvgPool2d.instead_of(node, {"x": x}, output=(1, 1))
        return self.instead_of(node, {"x": x}, **window)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        x = prologue.apply(a.get("prologue", ""), inputs)["x"]
        return F.avg_pool2d(x, *_average_arguments(node))

    def lower(self, node: Node, forms: Forms) -> Lowered:
        problem = image_problem(AvgPool2dProblem, node, forms.value(node.inputs["x"]), forms.stored)
        return Lowered(AVG_POOL2D, problem, dict.fromkeys(("gain", "shift"), FP32))


def _average_window(call: AtenCall) -> dict[str, Any] | None:
    """Return the attributes of an average pool; None for divisors that kernels do not support."""
    divisor = call("divisor_override")
    if divisor is not None and divisor < 1:
        return None
    count_padding = bool(call("count_include_pad", True))
    return {**_window(call), "count_padding": count_padding, "divisor": divisor or 0}


def _average_arguments(node: Node) -> tuple[Any, ...]:
    a = node.attributes
    window = a["kernel"], a["stride"], a["padding"], a["ceil_mode"]
    return (*window, a["count_padding"], a["divisor"] or None)


class AvgPool2dBackward(Operator):
    """dx of y = avg_pool2d(x), from the gradient of y."""

    name = "avg_pool2d_backward"
    preferred_layout = None
    computes_in_fp32 = True
    values = ("gradient",)

    @match_aten("avg_pool2d_backward")
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        gradient, window = call.value("grad_output"), _average_window(call)
        if gradient is None or len(node.shape) != 4 or window is None:
            return None
        return self.instead_of(node, {"gradient": gradient}, **window)

    @match_aten("_adaptive_avg_pool2d_backward")
    def _match_adaptive(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        """Match if the windows divide the image evenly."""
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
        gradient = inputs["gradient"]
        x = gradient.new_empty(node.shape)  # type: ignore[arg-type]  # only its shape is used
        backward: Any = torch.ops.aten.avg_pool2d_backward
        result: torch.Tensor = backward(gradient, x, *_average_arguments(node))
        return result

    def lower(self, node: Node, forms: Forms) -> Lowered:
        forward = image_problem(AvgPool2dProblem, node, forms.value(node.name), forms.stored)
        return Lowered(AVG_POOL2D_BACKWARD, AvgPool2dBackwardProblem(forward))


class AdaptiveAvgPool2d(Operator):
    """Means of an image divided into `output` rows and columns.

    With `quantized`, x is stored in that dtype, and `scale` is what it was divided by.
    """

    name = "adaptive_avg_pool2d"
    preferred_layout = None
    computes_in_fp32 = True
    signature = Signature({"x": IMAGE}, {"output": pair(1)})

    @match_aten("adaptive_avg_pool2d", "_adaptive_avg_pool2d")
    @match_aten("adaptive_avg_pool1d", sequence=("self",))
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        if len(node.shape) != 4:
            return None
        return self.instead_of(node, {"x": call.value("self")}, output=node.shape[2:])

    @match_aten("mean")
    def _match_mean(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        """Match the mean over height and width, with or without the reduced dimensions."""
        x, dim = call.value("self"), call("dim", ())
        dims = (dim,) if isinstance(dim, int) else tuple(dim)
        if x is None or len(graph.shape_of(x)) != 4 or {one % 4 for one in dims} != {2, 3}:
            return None
        if call.converts(x, graph):
            return None
        shape = (*graph.shape_of(x)[:2], 1, 1)
        pooled = replace(self.instead_of(node, {"x": x}, output=(1, 1)), shape=shape)
        if call("keepdim", False):
            return pooled
        return Reshape.instead_of(node, {"x": graph.add(replace(pooled, name=f"{node.name}_pool"))})

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return F.adaptive_avg_pool2d(dequantized(inputs), node.attributes["output"])

    @classmethod
    def is_nhwc_mean(cls, node: Node) -> bool:
        """Return True for the mean over a whole NHWC image."""
        a = node.attributes
        return cls.matches(node) and a["output"] == (1, 1) and a.get("layout", "nhwc") == "nhwc"

    def lower(self, node: Node, forms: Forms) -> Lowered:
        x_dtype = node.attributes.get("quantized", "")
        problem = image_problem(
            AdaptiveAvgPool2dProblem, node, forms.value(node.inputs["x"]), forms.stored, x_dtype=x_dtype
        )
        if problem.layout == "nchw" and problem.output == (1, 1) and problem.pixels >= _LARGE_PLANE:
            planes = problem.batch * problem.channels
            return Lowered(REDUCE, ReduceProblem("mean", planes, problem.pixels, dtype=problem.dtype))
        return Lowered(ADAPTIVE_AVG_POOL2D, problem, {"scale": FP32})
