"""ONNX operators of layers: convolutions, pools, normalizations, matrix products and reductions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from escalade.models.onnx_import.operators import OPERATORS, OnnxNode, as_tensor, given, operator
from escalade.models.onnx_import.shapes import axes_of

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_MAX_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE_POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


class _Window:
    """The window of a convolution or pool: its steps, and its padding before and after each dimension."""

    def __init__(self, node: OnnxNode, x: torch.Tensor, kernel: Sequence[int]) -> None:
        rank = x.dim() - 2
        self.kernel = list(kernel)
        self.strides = list(node.get("strides", [1] * rank))
        self.dilations = list(node.get("dilations", [1] * rank))
        node.require(1 <= rank <= 3, f"{rank} spatial dimensions are not supported, only 1 to 3")
        automatic = node.get("auto_pad", "NOTSET")
        if automatic in ("SAME_UPPER", "SAME_LOWER"):
            totals = [
                max((-(-size // stride) - 1) * stride + (width - 1) * dilation + 1 - size, 0)
                for size, stride, width, dilation in zip(
                    x.shape[2:], self.strides, self.kernel, self.dilations, strict=True
                )
            ]
            self.split(totals, more_behind=automatic == "SAME_UPPER")
        else:
            pads = list(node.get("pads", [0] * 2 * rank)) if automatic == "NOTSET" else [0] * 2 * rank
            self.before, self.after = pads[:rank], pads[rank:]

    def split(self, totals: Sequence[int], *, more_behind: bool) -> None:
        """Pad by `totals`, half before and half after each dimension."""
        smaller, larger = [total // 2 for total in totals], [total - total // 2 for total in totals]
        self.before, self.after = (smaller, larger) if more_behind else (larger, smaller)

    def without_padding_alone(self, y: torch.Tensor, image: Sequence[int]) -> torch.Tensor:
        """Return the results of windows that begin before the padding behind an image of this size."""
        counts = zip(image, self.before, self.strides, strict=True)
        kept = [slice(-(-(size + before) // stride)) for size, before, stride in counts]
        return y[(slice(None), slice(None), *kept)]

    @property
    def is_symmetric(self) -> bool:
        return self.before == self.after

    @property
    def amounts(self) -> list[int]:
        """The padding as F.pad takes it: the last dimension first."""
        pairs = zip(reversed(self.before), reversed(self.after), strict=True)
        return [amount for pair in pairs for amount in pair]


@operator("Conv")
def _convolution(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x, weight, bias = inputs[0], inputs[1], given(inputs, 2)
    window = _Window(node, x, weight.shape[2:])
    padding = window.before
    if not window.is_symmetric:
        x, padding = F.pad(x, window.amounts), [0] * len(padding)
    convolve: Callable[..., torch.Tensor] = _CONVOLUTIONS[x.dim() - 2]
    return convolve(x, weight, bias, window.strides, padding, window.dilations, node.get("group", 1))


@operator("ConvTranspose")
def _transposed_convolution(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x, weight, bias = inputs[0], inputs[1], given(inputs, 2)
    window = _Window(node, x, weight.shape[2:])
    rank = x.dim() - 2
    convolve: Callable[..., torch.Tensor] = _TRANSPOSED[rank]
    extra, groups = list(node.get("output_padding", [0] * rank)), node.get("group", 1)
    automatic, sizes = node.get("auto_pad", "NOTSET"), node.get("output_shape", None)
    if automatic.startswith("SAME") and sizes is None:
        sizes = [size * stride for size, stride in zip(x.shape[2:], window.strides, strict=True)]
    if sizes is not None:
        totals = [
            stride * (size - 1) + more + (width - 1) * dilation + 1 - wanted
            for size, stride, more, width, dilation, wanted in zip(
                x.shape[2:],
                window.strides,
                extra,
                window.kernel,
                window.dilations,
                sizes[-rank:],
                strict=True,
            )
        ]
        node.require(min(totals) >= 0, f"{sizes} results are more than the filters reach")
        window.split(totals, more_behind=automatic == "SAME_UPPER")
    padding = window.before if window.is_symmetric else [0] * rank
    y = convolve(x, weight, bias, window.strides, padding, extra, groups, window.dilations)
    return y if window.is_symmetric else F.pad(y, [-amount for amount in window.amounts])


@operator("MaxPool")
def _max_pool(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    node.require(node.outputs == 1, "indices are not computed")
    x = inputs[0]
    window, image = _Window(node, x, node.attributes["kernel_shape"]), x.shape[2:]
    padding = window.before
    if not window.is_symmetric or any(
        2 * pad > width for pad, width in zip(padding, window.kernel, strict=True)
    ):
        x, padding = F.pad(x, window.amounts, value=float("-inf")), [0] * len(padding)
    pool: Callable[..., torch.Tensor] = _MAX_POOLS[x.dim() - 2]
    ceil = bool(node.get("ceil_mode", 0))
    y = pool(x, window.kernel, window.strides, padding, window.dilations, ceil)
    return window.without_padding_alone(y, image) if ceil else y


@operator("AveragePool")
def _average_pool(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x = inputs[0]
    window = _Window(node, x, node.attributes["kernel_shape"])
    node.require({*window.dilations} == {1}, "dilations are not supported")
    pool: Callable[..., torch.Tensor] = _AVERAGE_POOLS[x.dim() - 2]
    ceil, counts_padding = bool(node.get("ceil_mode", 0)), bool(node.get("count_include_pad", 0))
    if window.is_symmetric:
        return pool(x, window.kernel, window.strides, window.before, ceil, counts_padding)
    node.require(not ceil, "ceil_mode with asymmetric padding is not supported")
    y = pool(F.pad(x, window.amounts), window.kernel, window.strides)
    if counts_padding:
        return y
    return y / pool(F.pad(torch.ones_like(x), window.amounts), window.kernel, window.strides)


@operator("GlobalAveragePool")
def _global_average_pool(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x = inputs[0]
    return F.adaptive_avg_pool2d(x, 1) if x.dim() == 4 else x.mean(tuple(range(2, x.dim())), keepdim=True)


@operator("BatchNormalization")
def _batch_norm(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    node.require(
        not node.get("training_mode", 0) and node.outputs == 1,
        "training mode is not supported; export the model in evaluation mode",
    )
    x, scale, bias, mean, variance = inputs
    return F.batch_norm(x, mean, variance, scale, bias, False, 0.0, node.get("epsilon", 1e-5))


@operator("InstanceNormalization")
def _instance_norm(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x, scale, bias = inputs
    return F.instance_norm(x, weight=scale, bias=bias, eps=node.get("epsilon", 1e-5))


@operator("GroupNormalization")
def _group_norm(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x, groups = inputs[0], node.attributes["num_groups"]
    # Before opset 21 a group has one scale and bias; since then, each channel has its own.
    weight, bias = (
        each if each.shape[0] == x.shape[1] else each.repeat_interleave(x.shape[1] // groups)
        for each in (as_tensor(value, x) for value in inputs[1:3])
    )
    return F.group_norm(x, groups, weight, bias, node.get("epsilon", 1e-5))


@operator("LayerNormalization")
def _layer_norm(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    node.require(node.outputs == 1, "mean and standard deviation are not computed")
    x = inputs[0]
    axis = node.get("axis", -1) % x.dim()
    shape = list(x.shape[axis:])
    weight, bias = (
        each if each is None or list(each.shape) == shape else each.expand(shape)
        for each in (as_tensor(inputs[1], x), given(inputs, 2))
    )
    return F.layer_norm(x, shape, weight, bias, node.get("epsilon", 1e-5))


@operator("LRN")
def _local_response_norm(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    size = node.attributes["size"]
    node.require(size % 2 == 1, "even sizes are not supported")
    return F.local_response_norm(
        inputs[0], size, node.get("alpha", 1e-4), node.get("beta", 0.75), node.get("bias", 1.0)
    )


@operator("Gemm")
def _gemm(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x, weight, bias = inputs[0], inputs[1], given(inputs, 2)
    alpha, beta = node.get("alpha", 1.0), node.get("beta", 1.0)
    x = x.t() if node.get("transA", 0) else x
    is_vector = bias is None or (isinstance(bias, torch.Tensor) and bias.dim() == 1)
    if alpha == beta == 1.0 and is_vector:
        return F.linear(x, weight if node.get("transB", 0) else weight.t(), bias)
    y = torch.matmul(x, weight.t() if node.get("transB", 0) else weight)
    y = y if alpha == 1.0 else alpha * y
    return y if bias is None else y + (bias if beta == 1.0 else beta * bias)


OPERATORS.update({
    "Einsum": lambda node, inputs: torch.einsum(node.attributes["equation"], *inputs),
    "GlobalMaxPool": lambda node, inputs: inputs[0].amax(tuple(range(2, inputs[0].dim())), keepdim=True),
    "LogSoftmax": lambda node, inputs: F.log_softmax(inputs[0], node.get("axis", -1)),
    "LpNormalization": lambda node, inputs: F.normalize(
        inputs[0], p=float(node.get("p", 2)), dim=node.get("axis", -1), eps=0.0
    ),
    "MatMul": lambda node, inputs: torch.matmul(*inputs),
    "Softmax": lambda node, inputs: F.softmax(inputs[0], node.get("axis", -1)),
})  # fmt: skip


def _product(x: torch.Tensor, axes: tuple[int, ...], keep: bool) -> torch.Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, keepdim=keep)
    return x


_REDUCTIONS: dict[str, Callable[[torch.Tensor, tuple[int, ...], bool], torch.Tensor]] = {
    "ReduceL1": lambda x, axes, keep: x.abs().sum(axes, keepdim=keep),
    "ReduceL2": lambda x, axes, keep: x.square().sum(axes, keepdim=keep).sqrt(),
    "ReduceLogSum": lambda x, axes, keep: x.sum(axes, keepdim=keep).log(),
    "ReduceLogSumExp": lambda x, axes, keep: x.logsumexp(axes, keepdim=keep),
    "ReduceMax": lambda x, axes, keep: x.amax(axes, keepdim=keep),
    "ReduceMean": lambda x, axes, keep: x.mean(axes, keepdim=keep),
    "ReduceMin": lambda x, axes, keep: x.amin(axes, keepdim=keep),
    "ReduceProd": _product,
    "ReduceSum": lambda x, axes, keep: x.sum(axes, keepdim=keep),
    "ReduceSumSquare": lambda x, axes, keep: x.square().sum(axes, keepdim=keep),
}


@operator(*_REDUCTIONS)
def _reduction(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    x = as_tensor(inputs[0], torch.zeros(())) if not isinstance(inputs[0], torch.Tensor) else inputs[0]
    axes = axes_of(node, inputs, x.dim())
    if not axes and node.get("noop_with_empty_axes", 0):
        return x
    return _REDUCTIONS[node.op](x, tuple(axes or range(x.dim())), bool(node.get("keepdims", 1)))


@operator("ArgMax", "ArgMin")
def _extremum_index(node: OnnxNode, inputs: Sequence[Any]) -> Any:
    node.require_defaults(select_last_index=0)
    function = torch.argmax if node.op == "ArgMax" else torch.argmin
    return function(inputs[0], node.get("axis", 0), keepdim=bool(node.get("keepdims", 1)))
