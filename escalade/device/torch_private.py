"""Private PyTorch APIs used as fast paths, each with a public fallback.

A PyTorch version that lacks one, or changed its meaning, makes calls slower, not wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import torch

Function = Callable[..., Any]
Allocate = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]
"""Allocates an uninitialized tensor of a size, strides and a dtype."""


def lookup(path: str) -> Any:
    """Return the attribute of `torch` with a dotted name; None if this version lacks it."""
    try:
        return reduce(getattr, path.split("."), torch)
    except AttributeError:
        return None


class FastPaths:
    """Private functions, or their fallbacks; `known` looks up a dotted name inside `torch`."""

    def __init__(self, known: Function = lookup) -> None:
        self.current_stream: Callable[[int], int] = known("_C._cuda_getCurrentRawStream") or _current_stream
        """Raw handle of the current stream of a GPU."""
        self.current_device: Callable[[], int] = known("_C._cuda_getDevice") or torch.cuda.current_device
        self.is_capturing: Callable[[], bool] = (
            known("_C._cuda_isCurrentStreamCapturing") or torch.cuda.is_current_stream_capturing
        )
        """True while the current stream is being captured into a CUDA graph."""
        self.any_autocast: Callable[[], bool] = known("_C._is_any_autocast_enabled") or _any_autocast
        # The fallbacks claim that a mode is active, which leaves all calls to PyTorch's dispatcher.
        self.function_modes: Callable[[], int] = known("_C._len_torch_function_stack") or _always
        self.dispatch_modes: Callable[[], int] = known("_C._len_torch_dispatch_stack") or _always
        self.transforms: Callable[[], int] = known("_C._are_functorch_transforms_active") or _always
        # PyTorch's public functions for these release the GIL.
        self.is_negative: Callable[[torch.Tensor], bool] = (
            _has_dispatch_key(known, "Negative") or torch.Tensor.is_neg
        )
        """True for tensors with the negative bit set (lazy negation)."""
        self.is_zero_tensor: Callable[[torch.Tensor], bool] = (
            _has_dispatch_key(known, "ZeroTensor") or torch.Tensor._is_zerotensor
        )
        """True for zero tensors without memory, which autograd creates."""
        self.allow_flag_changes: Callable[[], AbstractContextManager[None]] = (
            known("backends.__allow_nonbracketed_mutation") or nullcontext
        )
        """Allows setting flags frozen by `torch.backends.disable_global_flags`; callers must restore them."""
        self._mode_at = known("_C._get_function_stack_at")
        self._guards = known("_C._dynamo.guards.TensorGuards")
        self._empty = {kind: known(f"_C._dynamo.guards._empty_strided_{kind}") for kind in ("cuda", "cpu")}

    def is_default_device(self) -> bool:
        """Return True if the only function mode is that of `torch.set_default_device`."""
        if self.function_modes() != 1 or self._mode_at is None:
            return False
        return type(self._mode_at(0)).__module__ == "torch.utils._device"

    def allocator(self, device: torch.device) -> Allocate:
        """Return an allocator for the device, which must be current when it is called.

        Inductor's `_empty_strided_*` takes a third of the time of `torch.empty_strided`.
        """
        quick = self._empty.get(device.type)
        if quick is not None:
            try:
                made = quick((2, 3), (1, 2), torch.float16)
            except (TypeError, RuntimeError):
                made = None
            if isinstance(made, torch.Tensor) and _kind(made)[1:] == ((2, 3), (1, 2), torch.float16, device):
                allocate: Allocate = quick
                return allocate
        return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)

    def guard(self, tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
        """Return a predicate that matches tensors like these.

        It compares type, size, strides, dtype, device and requires_grad, and that the dispatcher would treat them the
        same way.
        """
        if len({id(tensor) for tensor in tensors}) < len(tensors):  # TensorGuards reject duplicates
            one_by_one = [self.guard([tensor]) for tensor in tensors]
            return lambda *given: all([holds(one) for holds, one in zip(one_by_one, given, strict=True)])
        try:
            check: Callable[..., bool] = self._guards(
                *tensors,
                dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
                dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
            ).check
            if check(*tensors) is True:
                return check
        except (TypeError, RuntimeError, AttributeError):
            pass
        return self._python_guard(tensors)

    def _python_guard(self, tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
        kinds = [(*_kind(one), one.requires_grad, one.is_inference(), False) for one in tensors]

        def holds(*given: torch.Tensor) -> bool:
            if self.dispatch_modes() or self.transforms() or torch.jit.is_tracing():
                return False
            return [
                (*_kind(one), one.requires_grad, one.is_inference(), one.is_neg()) for one in given
            ] == kinds

        return holds

    def recording(self, name: str, forward: Function, backward: Function, kept: Any) -> Function:
        """Return a function that calls `forward(ctx, *arguments)` and registers `backward` with autograd.

        `ctx.kept` is `kept`. No functorch transform may be active.
        """

        def keeping(ctx: Any, *arguments: Any) -> Any:
            ctx.kept = kept
            return forward(ctx, *arguments)

        members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        kind = type(name, (torch.autograd.Function,), members)
        context = getattr(kind, "_backward_cls", None)
        try:
            # Bypasses the transform checks of Function.apply, and the context's wrapper around `backward`.
            apply: Function = super(torch.autograd.Function, kind).apply  # type: ignore[misc]
            context.kept, context.apply = kept, backward  # type: ignore[union-attr]
        except (AttributeError, TypeError):
            kind.forward = staticmethod(keeping)  # type: ignore[attr-defined]
            return kind.apply  # type: ignore[attr-defined]
        return apply


def _has_dispatch_key(known: Function, name: str) -> Callable[[torch.Tensor], bool] | None:
    keys, key = known("_C._dispatch_keys"), known(f"_C.DispatchKey.{name}")
    return None if keys is None or key is None else lambda tensor: keys(tensor).has(key)


def _current_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


def _any_autocast() -> bool:
    return any(torch.is_autocast_enabled(kind) for kind in ("cuda", "cpu"))


def _always() -> int:
    return 1


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


FAST_PATHS = FastPaths()
