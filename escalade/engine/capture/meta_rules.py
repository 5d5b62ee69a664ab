"""Shape rules for the operators that most networks consist of.

PyTorch's meta kernels cover every operator, but their first call loads the compiler, which takes seconds. They are the
fallback where a rule returns None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.torch_version import TorchVersion

from escalade.device.strides import MEMORY_FORMAT, is_packed, layout_of

Tensor = torch.Tensor
_aten = torch.ops.aten
_CONV_META_IS_CONTIGUOUS = TorchVersion(torch.__version__) >= "2.13"
"""True if PyTorch's own rule ignores memory formats. The rule loads sympy, which takes half a second."""


def meta_result(function: Any, arguments: Sequence[Any], keywords: dict[str, Any]) -> Any:
    """Return the result of an operator on meta tensors."""
    rule = _RULES.get(function)
    result = rule(*arguments, **keywords) if rule is not None else None
    return function(*arguments, **keywords) if result is None else result


def _memory_format(x: Tensor) -> torch.memory_format | None:
    """Return the memory format of a packed tensor, or None; images of one channel or pixel count as contiguous."""
    layout = layout_of(x)
    return MEMORY_FORMAT[layout] if is_packed(x, layout) else None


def _like(x: Tensor, *shape: int) -> Tensor | None:
    order = _memory_format(x)
    if order is None or not all(size > 0 for size in shape):
        return None
    return torch.empty(shape, dtype=x.dtype, device="meta", memory_format=order)


def _elementwise(x: Tensor, *_: Any, **__: Any) -> Tensor | None:
    return _like(x, *x.shape) if x.is_floating_point() else None


def _binary(x: Tensor, other: Any, **_: Any) -> Tensor | None:
    """Handle equal dtypes with one operand broadcast to the other, and a tensor with a number."""
    if isinstance(other, float | int):
        return _elementwise(x)
    if not isinstance(other, Tensor) or x.dtype != other.dtype or x.dim() != other.dim():
        return None
    large, small = (x, other) if x.numel() >= other.numel() else (other, x)
    fits = all(a == b or b == 1 for a, b in zip(large.shape, small.shape, strict=True))
    same_format = _memory_format(x) == _memory_format(other) or all(size == 1 for size in small.shape[2:])
    return _elementwise(large) if fits and same_format and large.dim() > 1 else None


def _binary_in_place(x: Tensor, other: Any, **_: Any) -> Tensor | None:
    return x if (made := _binary(x, other)) is not None and made.shape == x.shape else None


def _in_place(x: Tensor, *_: Any, **__: Any) -> Tensor | None:
    return x if x.is_floating_point() else None


def _output_size(size: int, window: int, stride: int, padding: int, dilation: int) -> int:
    return (size + 2 * padding - dilation * (window - 1) - 1) // stride + 1


def _pair(values: Any) -> list[int]:
    return [*values] * (2 // len(values))


def _conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = (1,), padding: Any = (0,),
    dilation: Any = (1,), groups: int = 1,
) -> Tensor | None:  # fmt: skip
    fits = x.dim() == weight.dim() == 4 and x.shape[1] == weight.shape[1] * groups
    fits = fits and x.dtype == weight.dtype and (bias is None or bias.dtype == x.dtype)
    if not fits or weight.shape[0] % groups or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    formats = {_memory_format(x), _memory_format(weight)}
    if formats != {torch.contiguous_format} and not _CONV_META_IS_CONTIGUOUS:
        return None
    dimensions = zip(x.shape[2:], weight.shape[2:], *map(_pair, (stride, padding, dilation)), strict=True)
    shape = (x.shape[0], weight.shape[0], *(_output_size(*dimension) for dimension in dimensions))
    return torch.empty(shape, dtype=x.dtype, device="meta") if all(size > 0 for size in shape) else None


def _batch_norm(x: Tensor, *statistics: Any, **_: Any) -> Tensor | None:
    channels = [one.shape for one in statistics if isinstance(one, Tensor)]
    fits = x.dim() > 1 and all(shape == x.shape[1:2] for shape in channels)
    return _elementwise(x) if fits else None


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor | None:
    fits = x.dim() > 1 and weight.dim() == 2 and x.shape[-1] == weight.shape[1] and x.dtype == weight.dtype
    if not fits or (bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != x.dtype)):
        return None
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device="meta")


def _max_pool2d(
    x: Tensor,
    window: Any,
    stride: Any = (),
    padding: Any = (0,),
    dilation: Any = (1,),
    ceil_mode: bool = False,
) -> Tensor | None:
    if (
        x.dim() != 4
        or ceil_mode
        or any(2 * p > w for p, w in zip(_pair(padding), _pair(window), strict=True))
    ):
        return None
    dimensions = zip(x.shape[2:], *map(_pair, (window, stride or window, padding, dilation)), strict=True)
    return _like(x, *x.shape[:2], *(_output_size(*dimension) for dimension in dimensions))


def _avg_pool2d(
    x: Tensor, window: Any, stride: Any = (), padding: Any = (0,), ceil_mode: bool = False, *_: Any
) -> Tensor | None:
    return _max_pool2d(x, window, stride, padding, (1,), ceil_mode)


def _adaptive_avg_pool2d(x: Tensor, size: Any) -> Tensor | None:
    return _like(x, *x.shape[:2], *size) if x.dim() == 4 else None


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Tensor | None:
    if (
        x.dim() != 4
        or dtype is not None
        or _elementwise(x) is None
        or sorted(d % 4 for d in dim or ()) != [2, 3]
    ):
        return None
    return torch.empty((*x.shape[:2], *([1, 1] if keepdim else [])), dtype=x.dtype, device="meta")


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Tensor | None:
    first = tensors[0]
    others = [(one.dtype, _memory_format(one), [*one.shape]) for one in tensors]
    dim %= max(first.dim(), 1)
    sizes = [size.pop(dim) if size else 0 for *_, size in others]
    if first.dim() < 2 or any(other != others[0] for other in others):
        return None
    return _like(first, *first.shape[:dim], sum(sizes), *first.shape[dim + 1 :])


_ELEMENTWISE = (
    "relu", "silu", "sigmoid", "tanh", "gelu", "hardswish", "hardsigmoid", "hardtanh", "relu6", "leaky_relu",
)  # fmt: skip
_BINARY = ("add", "sub", "mul", "div")
_RULES: dict[Any, Callable[..., Tensor | None]] = {
    **{getattr(_aten, name).default: _elementwise for name in _ELEMENTWISE},
    **{getattr(_aten, f"{name}_").default: _in_place for name in _ELEMENTWISE if hasattr(_aten, f"{name}_")},
    # PyTorch has no rules for these
    _aten.fake_quantize_per_tensor_affine.default: _elementwise,
    _aten.fake_quantize_per_tensor_affine.tensor_qparams: _elementwise,
    _aten.fake_quantize_per_channel_affine.default: _elementwise,
    **{getattr(_aten, name).Tensor: _binary for name in _BINARY},
    **{getattr(_aten, f"{name}_").Tensor: _binary_in_place for name in _BINARY},
    _aten.conv2d.default: _conv2d,
    _aten.batch_norm.default: _batch_norm,
    _aten.linear.default: _linear,
    _aten.max_pool2d.default: _max_pool2d,
    _aten.avg_pool2d.default: _avg_pool2d,
    _aten.adaptive_avg_pool2d.default: _adaptive_avg_pool2d,
    _aten.mean.dim: _mean,
    _aten.cat.default: _cat,
}
