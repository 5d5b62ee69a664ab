"""PyTorch's fake tensors, with direct rules for batch normalization in training.

PyTorch follows each normalization and each of its gradients through 20 other operators, which takes a third of the time
to capture a network with a hundred of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

Tensor = torch.Tensor
_aten = torch.ops.aten


def step_fake_tensor_mode(**settings: Any) -> FakeTensorMode:
    """Return a mode for the capture of a training step.

    Not of a class of its own: PyTorch finds the rules of its higher-order operators by the type of the mode.
    """
    mode = FakeTensorMode(**settings)
    dispatch = mode._dispatch_impl

    def dispatch_step(
        func: Any, types: Sequence[type], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        rule = _RULES.get(func)
        if rule is not None and not kwargs and args[0].dim() > 1 and args[0].numel():
            with mode:
                result = rule(*args)
            if result is not None:
                return result
        return dispatch(func, types, args, kwargs)

    mode._dispatch_impl = dispatch_step  # type: ignore[method-assign]
    return mode


def _batch_norm(
    x: Tensor,
    weight: Any,
    bias: Any,
    mean: Any,
    variance: Any,
    training: bool,
    momentum: float,
    epsilon: float,
) -> tuple[Tensor, ...] | None:
    if not training:
        return None
    wide = _wide(x)
    results = [_like(x - _statistics(x), x)]
    results += [_channels(x, x.dtype if x.device.type == "cpu" else wide) for _ in range(2)]
    return tuple(results)


def _functional_batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Tensor, variance: Tensor, *rest: Any
) -> tuple[Tensor, ...] | None:
    results = _batch_norm(x, weight, bias, mean, variance, *rest)
    if results is None:
        return None
    new = (_channels(x, torch.promote_types(_wide(x), old.dtype)) for old in (mean, variance))
    return (*results, *new)


def _batch_norm_backward(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Any,
    variance: Any,
    saved_mean: Any,
    saved_rstd: Any,
    training: bool,
    epsilon: float,
    mask: Sequence[bool],
) -> tuple[Tensor | None, ...] | None:
    if not training:
        return None
    dtype = x.dtype if weight is None else weight.dtype
    own = [_channels(x, dtype) if wanted else None for wanted in mask[1:]]
    return (_like(gradient - (x - _statistics(x)), x), *own)


def _wide(x: Tensor) -> torch.dtype:
    """Return the dtype of the statistics."""
    return torch.promote_types(x.dtype, torch.float32)


def _statistics(x: Tensor) -> Tensor:
    """Return one number per channel, with the dimensions of x: strides of results depend on all operands."""
    return x.new_empty((1, x.shape[1], *(1 for _ in x.shape[2:])), dtype=_wide(x))


def _channels(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty((x.shape[1],), dtype=dtype)


def _like(result: Tensor, x: Tensor) -> Tensor:
    return result if result.dtype is x.dtype else result.to(x.dtype)


_RULES: Mapping[Any, Callable[..., tuple[Tensor | None, ...] | None]] = {
    _aten.native_batch_norm.default: _batch_norm,
    _aten._native_batch_norm_legit.default: _batch_norm,
    _aten._native_batch_norm_legit_functional.default: _functional_batch_norm,
    _aten.native_batch_norm_backward.default: _batch_norm_backward,
}
