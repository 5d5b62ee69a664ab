"""Convolutions of volumes and their gradients, on images with a frame's pixels in each row (`volumes`).

Filters are [K, C, frames * rows, columns].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeGuard

import torch
import torch.nn.functional as F

from escalade.engine.graph.graph import Graph, Node, Shape, dtype_name
from escalade.engine.nodes.base import VOLUMES, AtenCall, Match, Operator, Tensors, activate, match_aten
from escalade.engine.nodes.batch_norm import training_statistics
from escalade.engine.nodes.conv2d import (
    BIAS_DIMS,
    BIAS_GRADIENT,
    Conv2d,
    Conv2dInputGradient,
    Conv2dWeightGradient,
    InputGradient,
    bias_gradient,
)
from escalade.engine.nodes.lowering import FP32, NHWC, Forms, Lowered, problem_from
from escalade.engine.nodes.rearrange import Pad2d
from escalade.engine.nodes.signature import Sizes
from escalade.engine.nodes.views import VOLUME_RANK, Concatenate, Permute, Reshape
from escalade.engine.nodes.volumes import FrameStack, VolumeShuffle, as_frame_rows, viewed
from escalade.ops.conv2d import CONV2D, Conv2dProblem
from escalade.ops.conv2d_input_gradient import CONV2D_INPUT_GRADIENT, Conv2dInputGradientProblem
from escalade.ops.conv2d_weight_gradient import CONV2D_WEIGHT_GRADIENT, Conv2dWeightGradientProblem
from escalade.ops.shared.activation import VECTORS

_WINDOW = {"stride": 1, "padding": 0, "dilation": 1}
"""Attributes for frames, rows and columns, with their defaults."""


def _volume_window(call: AtenCall) -> dict[str, Any] | None:
    """Return the window and groups of a call; None if padding is given in words."""
    window: dict[str, Any] = {}
    for key, default in _WINDOW.items():
        value = call(key, default)
        if isinstance(value, str):
            return None
        values = (value,) if isinstance(value, int) else tuple(value) or (default,)
        window[key] = values * 3 if len(values) == 1 else values
    return {**window, "groups": call("groups", 1)}


def _as_filters(graph: Graph, name: str) -> str:
    """Return the filters of volumes with the rows of all frames as rows."""
    if name in graph.constants:
        return graph.derive_constant(f"{name}_rows", name, lambda weight: weight.flatten(2, 3))
    return viewed(graph, name, _filter_shape(graph.shape_of(name)))


def _filter_shape(shape: Shape) -> Shape:
    filters, channels, frames, rows, columns = shape
    return filters, channels, frames * rows, columns  # type: ignore[operator]


class _OfVolumes(Operator):
    """A layer on volumes with filters, in NHWC."""

    def pytorch_constants(self, node: Node) -> Mapping[str, str]:
        return {"weight": NHWC}

    @classmethod
    def add(
        cls, graph: Graph, node: Node, inputs: Mapping[str, str | None], shape: Shape, **given: Any
    ) -> str:
        """Append a node for a call that returns volumes or filters of this shape."""
        made = cls.instead_of(node, inputs, **given)
        return graph.add(replace(made, name=graph.fresh(f"{node.name}_image"), shape=shape))


def _problem(node: Node, image: Sizes, filters: Sizes, **given: Any) -> Conv2dProblem:
    """Return the convolution: of images, if the filter does not span frames or does not span their pixels."""
    a, (batch, channels, depth, pixels) = node.attributes, image
    (height, width), frames = a["sides"], a["filter_frames"]
    count, _, rows, columns = filters
    rows //= frames
    (step, *stride), (pad, *padding), (apart, *dilation) = (a[key] for key in _WINDOW)
    window = {"filters": count, "layout": "nhwc", "filter_frames": 1, **given}
    if (frames, step, pad) == (1, 1, 0):
        return problem_from(
            Conv2dProblem, node, batch=batch * depth, channels=channels, height=height, width=width,
            filter_height=rows, filter_width=columns, stride=tuple(stride), padding=tuple(padding),
            dilation=tuple(dilation), **window,
        )  # fmt: skip
    if (rows, columns, *stride, *padding) == (1, 1, 1, 1, 0, 0):
        return problem_from(
            Conv2dProblem, node, batch=batch, channels=channels, height=depth, width=pixels, filter_height=frames,
            filter_width=1, stride=(step, 1), padding=(pad, 0), dilation=(apart, 1), **window,
        )  # fmt: skip
    return problem_from(
        Conv2dProblem, node, batch=batch, channels=channels, height=height, width=width, filter_height=rows,
        filter_width=columns, stride=tuple(stride), padding=tuple(padding), dilation=tuple(dilation), frames=depth,
        frame_stride=step, frame_padding=pad, frame_dilation=apart, **{**window, "filter_frames": frames},
    )  # fmt: skip


_STACKED_BYTES = 128
"""Largest pixel of stacked frames: with more, the kernels' k-tiles of that size are filled without stacking."""


def _is_stacked(graph: Graph, node: Node, weight: str) -> bool:
    """Return True if the frames of a filter are stacked as channels."""
    _, channels, frames, *rest = graph.shape_of(weight)
    element = 2 if not graph.typed or getattr(torch, node.dtype).itemsize == 2 else 4
    return frames > 1 and rest != [1, 1] and channels * frames * element <= _STACKED_BYTES  # type: ignore[operator]


def _within_frames(window: Mapping[str, Any]) -> dict[str, Any]:
    """Return the window for stacked frames."""
    inner = {key: (default, *window[key][1:]) for key, default in _WINDOW.items()}
    return {**inner, "groups": window["groups"]}


def _stacked(graph: Graph, node: Node, x: str, weight: str, window: Mapping[str, Any]) -> str:
    """Append the frames that a filter covers, stacked as channels."""
    (pad, *_), (step, *_), (apart, *_) = (window[key] for key in ("padding", "stride", "dilation"))
    taps, rows = graph.shape_of(weight)[2], as_frame_rows(graph, node, x)
    batch, channels, depth, pixels = graph.shape_of(rows)
    dtype = dtype_name(graph.dtype_of(x))
    if pad:
        attributes = {"pads": (pad, pad, 0, 0), "mode": "constant", "value": 0.0}
        depth += 2 * pad
        rows = graph.add(
            Pad2d.node(
                graph.fresh(f"{node.name}_padded"),
                {"x": rows},
                attributes,
                (batch, channels, depth, pixels),
                dtype,
            )
        )
    count = (depth - apart * (taps - 1) - 1) // step + 1  # type: ignore[operator]
    attributes = {"taps": taps, "stride": step, "dilation": apart}
    shape = batch, channels * taps, count, pixels  # type: ignore[operator]
    return graph.add(
        FrameStack.node(graph.fresh(f"{node.name}_stack"), {"x0": rows}, attributes, shape, dtype)
    )


def _reordered(graph: Graph, weight: str, order: tuple[int, ...], shape: Shape) -> str:
    """Return filters with another order of dimensions, in another shape."""
    if weight in graph.constants:
        return graph.derive_constant(
            f"{weight}_reordered",
            weight,
            lambda one: one.permute(order).reshape(shape).contiguous(),  # type: ignore[arg-type]
        )
    sizes, dtype = tuple(graph.shape_of(weight)[dim] for dim in order), dtype_name(graph.dtype_of(weight))
    moved = Permute.node(graph.fresh(f"{weight}_moved"), {"x": weight}, {"order": order}, sizes, dtype)
    return viewed(graph, graph.add(moved), shape)


def _repeated(graph: Graph, bias: str, times: int) -> str:
    if bias in graph.constants:
        return graph.derive_constant(f"{bias}_repeated", bias, lambda one: one.repeat(times))
    (size,), dtype = graph.shape_of(bias), dtype_name(graph.dtype_of(bias))
    parts = {f"x{number}": bias for number in range(times)}
    return graph.add(
        Concatenate.node(graph.fresh(f"{bias}_repeated"), parts, {"dimension": 0}, (times * size,), dtype)  # type: ignore[operator]
    )


def _any(value: Any) -> bool:
    return any(value) if isinstance(value, tuple | list) else bool(value)


def _window(node: Node) -> tuple[Any, ...]:
    return tuple(node.attributes[key] for key in _WINDOW)


class Conv3d(_OfVolumes):
    """y = conv(x, weight) + bias [+ residual], then ReLU or another expression.

    In a training step the statistics of the result may be side outputs.
    """

    name = "conv3d"
    takes_expressions = True
    fp32_roles = ("running_mean", "running_variance")
    values = ("x", "residual", *fp32_roles)

    @match_aten("conv3d", "convolution", phases=(VOLUMES,))
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        if call("transposed", False):
            return self._match_transposed(node, call, graph)
        x, weight, bias = (call.value(name) for name in ("input", "weight", "bias"))
        window = _volume_window(call)
        if x is None or weight is None or window is None or not node.is_floating:
            return None
        if len(node.shape) != VOLUME_RANK or len(graph.shape_of(x)) != VOLUME_RANK or window["groups"] != 1:
            return None
        if not graph.typed and not {weight, bias or weight} <= graph.constants.keys():
            return None
        if _is_stacked(graph, node, weight):
            return Reshape.instead_of(node, {"x": self._of_stack(graph, node, x, weight, bias, window)})
        return Reshape.instead_of(node, {"x": self.of(graph, node, x, weight, bias, window)})

    @match_aten("conv_transpose3d", phases=(VOLUMES,))
    def _match_transposed(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        """Match a transposed convolution whose windows are side by side: a 1x1 convolution whose channels are boxes."""
        x, weight, bias = (call.value(name) for name in ("input", "weight", "bias"))
        window = _volume_window(call)
        if x is None or weight is None or window is None or not node.is_floating:
            return None
        if len(node.shape) != VOLUME_RANK or len(graph.shape_of(x)) != VOLUME_RANK:
            return None
        if not graph.typed and not {weight, bias or weight} <= graph.constants.keys():
            return None
        channels, filters, *box = graph.shape_of(weight)
        plain = {"stride": tuple(box), "padding": (0, 0, 0), "dilation": (1, 1, 1), "groups": 1}
        if window != plain or _any(call("output_padding", 0)):
            return None
        elements = math.prod(box)  # type: ignore[arg-type]
        batch, _, depth, height, width = graph.shape_of(x)
        matrix = (elements * filters, channels, 1, 1)  # type: ignore[operator]
        inputs = {
            "x": as_frame_rows(graph, node, x),
            "weight": _reordered(graph, weight, (2, 3, 4, 1, 0), matrix),
            "bias": None if bias is None else _repeated(graph, bias, elements),
        }
        product = Conv2d.instead_of(
            node, inputs, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1, relu=False
        )
        boxes = batch, matrix[0], depth, height * width  # type: ignore[operator]
        product = replace(product, name=graph.fresh(f"{node.name}_boxes"), shape=boxes)
        depth, height, width = node.shape[2:]
        shape = batch, filters, depth, height * width  # type: ignore[operator]
        shuffled = VolumeShuffle.node(
            graph.fresh(f"{node.name}_image"), {"x0": graph.add(product)},
            {"box": tuple(box), "sides": graph.shape_of(x)[3:]}, shape, node.dtype,
        )  # fmt: skip
        return Reshape.instead_of(node, {"x": graph.add(shuffled)})

    @classmethod
    def _of_stack(
        cls, graph: Graph, node: Node, x: str, weight: str, bias: str | None, window: Mapping[str, Any]
    ) -> str:
        """Append the convolution as one of stacked frames."""
        filters, channels, taps, *rest = graph.shape_of(weight)
        stacked = _stacked(graph, node, x, weight, window)
        matrix = filters, taps * channels, *rest  # type: ignore[operator]
        inputs = {"x": stacked, "weight": _reordered(graph, weight, (0, 2, 1, 3, 4), matrix), "bias": bias}
        batch, _, depth, height, width = node.shape
        return cls.add(
            graph, node, inputs, (batch, filters, depth, height * width), **_within_frames(window),  # type: ignore[operator]
            relu=False, sides=graph.shape_of(x)[3:], filter_frames=1,
        )  # fmt: skip

    @classmethod
    def of(
        cls, graph: Graph, node: Node, x: str, weight: str, bias: str | None, window: Mapping[str, Any]
    ) -> str:
        """Append the convolution that a call computes."""
        batch, filters, depth, height, width = node.shape
        inputs = {"x": as_frame_rows(graph, node, x), "weight": _as_filters(graph, weight), "bias": bias}
        return cls.add(
            graph, node, inputs, (batch, filters, depth, height * width), **window, relu=False,  # type: ignore[operator]
            sides=graph.shape_of(x)[3:], filter_frames=graph.shape_of(weight)[2],
        )  # fmt: skip

    def takes_residual(self, node: Node) -> bool:
        return True

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        x, weight = (
            inputs["x"].unflatten(3, a["sides"]),
            inputs["weight"].unflatten(2, (a["filter_frames"], -1)),
        )
        y = F.conv3d(
            x, weight, inputs.get("bias"), a["stride"], a["padding"], a["dilation"], a["groups"]
        ).flatten(3)
        return activate(node, y, inputs.get("residual"), inputs)

    def side_outputs(self, node: Node, inputs: Tensors) -> Tensors:
        a = node.attributes
        return training_statistics(self.compute(node, inputs), inputs, a["epsilon"], a["momentum"])

    def lower(self, node: Node, forms: Forms) -> Lowered:
        image, filters = forms.value(node.inputs["x"]).shape, forms.sizes(node.inputs["weight"])
        problem = _problem(node, image, filters, dtype=forms.dtype)
        return Lowered(CONV2D, problem, {"weight": NHWC, **dict.fromkeys(VECTORS, FP32)})


def _backward(
    node: Node, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, result: int
) -> torch.Tensor:
    """Return PyTorch's gradient by x or by the weights."""
    a = node.attributes
    x, weight = x.unflatten(3, a["sides"]), weight.unflatten(2, (a["filter_frames"], -1))
    sides = [
        (size + 2 * pad - apart * (taps - 1) - 1) // step + 1
        for size, taps, step, pad, apart in zip(x.shape[2:], weight.shape[2:], *_window(node), strict=True)
    ]
    backward: Any = torch.ops.aten.convolution_backward
    found: torch.Tensor = backward(
        gradient.unflatten(3, sides[1:]), x, weight, None, *_window(node), False, [0, 0, 0], a["groups"],
        [index == result for index in range(3)],
    )[result]  # fmt: skip
    return found


class Conv3dInputGradient(InputGradient, _OfVolumes):
    """dx of y = conv(x, weight), from the gradient of y; mask, residual and `norm` as of `Conv2dInputGradient`."""

    name = "conv3d_input_gradient"
    fp32_roles = ("norm_mean", "norm_rstd", "norm_weight", "norm_bias")
    values = ("gradient", "mask", "residual", "norm_x", "norm_output", *fp32_roles)

    @match_aten("convolution_backward", phases=(VOLUMES,))
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        gradient, x, weight = (call.value(role) for role in ("grad_output", "input", "weight"))
        window = _volume_window(call)
        if gradient is None or x is None or weight is None or window is None or not node.is_floating:
            return None
        if len(graph.shape_of(x)) != VOLUME_RANK or window["groups"] != 1:
            return None
        # A transposed convolution is the input gradient of a convolution, whose input is the transposed one's result.
        is_transposed = call("transposed", False)
        if is_transposed and _any(call("output_padding", 0)):
            return None
        result, taps = node.attributes["result"], graph.shape_of(weight)[2]
        if result == 2:
            return bias_gradient(node, as_frame_rows(graph, node, gradient))
        if result == 0 and is_transposed:
            return Reshape.instead_of(node, {"x": Conv3d.of(graph, node, gradient, weight, None, window)})
        image, of_result = (gradient, x) if is_transposed else (x, gradient)
        window |= {"sides": graph.shape_of(image)[3:], "filter_frames": taps}
        if result == 0:
            inputs = {"gradient": as_frame_rows(graph, node, gradient), "weight": _as_filters(graph, weight)}
            batch, channels, depth, height, width = node.shape
            shape = batch, channels, depth, height * width  # type: ignore[operator]
            return Reshape.instead_of(node, {"x": self.add(graph, node, inputs, shape, **window)})
        inputs = {"x": as_frame_rows(graph, node, image), "gradient": as_frame_rows(graph, node, of_result)}
        if not is_transposed and _is_stacked(graph, node, weight):
            return self._of_stack(graph, node, call, window, inputs["gradient"])
        made = Conv3dWeightGradient.add(graph, node, inputs, _filter_shape(node.shape), **window, bias=False)
        return Reshape.instead_of(node, {"x": made})

    @staticmethod
    def _of_stack(
        graph: Graph, node: Node, call: AtenCall, window: Mapping[str, Any], gradient: str
    ) -> Match:
        """Return the gradient of the weights as that for stacked frames, in their order."""
        x, weight = call.value("input"), call.value("weight")
        assert x is not None and weight is not None
        filters, channels, taps, *rest = graph.shape_of(weight)
        inputs = {"x": _stacked(graph, node, x, weight, window), "gradient": gradient}
        made = Conv3dWeightGradient.add(
            graph, node, inputs, (filters, taps * channels, *rest), **_within_frames(window),  # type: ignore[operator]
            sides=window["sides"], filter_frames=1, bias=False,
        )  # fmt: skip
        split = viewed(graph, made, (filters, taps, channels, *rest))
        return Permute.instead_of(node, {"x": split}, order=(0, 2, 1, 3, 4))

    def convolution_gradient(
        self, node: Node, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        return _backward(node, gradient, x, weight, 0).flatten(3)

    def lower(self, node: Node, forms: Forms) -> Lowered:
        filters, image = forms.sizes(node.inputs["weight"]), forms.value(node.name).shape
        forward = _problem(node, image, filters, dtype=forms.dtype)
        norm = node.attributes.get("norm", "")
        problem = Conv2dInputGradientProblem(forward, mask="mask" in node.inputs, norm=norm)
        return Lowered(CONV2D_INPUT_GRADIENT, problem, {"weight": NHWC})


def is_input_gradient(node: Node | None) -> TypeGuard[Node]:
    """Return True for the input gradient of a convolution of images or volumes."""
    return Conv2dInputGradient.matches(node) or Conv3dInputGradient.matches(node)


def is_weight_gradient(node: Node | None) -> TypeGuard[Node]:
    """Return True for the weight gradient of a convolution of images or volumes."""
    return Conv2dWeightGradient.matches(node) or Conv3dWeightGradient.matches(node)


class Conv3dWeightGradient(_OfVolumes):
    """dw of y = conv(x, w), from x and the gradient of y; with `bias`, the gradient of the bias is a side output."""

    name = "conv3d_weight_gradient"
    values = ("x", "gradient")

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        weight = inputs["x"].new_empty(node.shape)  # type: ignore[arg-type]  # only its shape is used
        return _backward(node, inputs["gradient"], inputs["x"], weight, 1).flatten(2, 3)

    def side_outputs(self, node: Node, inputs: Tensors) -> Tensors:
        return {BIAS_GRADIENT: inputs["gradient"].sum(BIAS_DIMS)}

    def lower(self, node: Node, forms: Forms) -> Lowered:
        image, filters = forms.value(node.inputs["x"]).shape, forms.value(node.name).shape
        forward = _problem(node, image, filters, dtype=forms.stored)
        return Lowered(CONV2D_WEIGHT_GRADIENT, Conv2dWeightGradientProblem(forward))
