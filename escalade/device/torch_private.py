"""Words of PyTorch's that are not public, for what its public ones take too long to say.

Each has a public way in its place: a version of PyTorch that has a word no longer, or gives it another meaning, makes
calls slower and not wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from typing import Any

import torch

Function = Callable[..., Any]
Allocate = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]
"""Makes a tensor of a size, strides and a dtype, with nothing in it."""


def lookup(path: str) -> Any:
    """What `torch` has under a dotted name; None where this version has nothing."""
    try:
        return reduce(getattr, path.split("."), torch)
    except AttributeError:
        return None


class FastPaths:
    """What PyTorch has, or what stands for it; `known` says what is under a dotted name inside `torch`."""

    def __init__(self, known: Function = lookup) -> None:
        self.current_stream: Callable[[int], int] = known("_C._cuda_getCurrentRawStream") or _current_stream
        """The current stream of a GPU, as the driver takes it."""
        self.current_device: Callable[[], int] = known("_C._cuda_getDevice") or torch.cuda.current_device
        self.is_capturing: Callable[[], bool] = (
            known("_C._cuda_isCurrentStreamCapturing") or torch.cuda.is_current_stream_capturing
        )
        """Whether the current stream is being recorded into a CUDA graph."""
        self.any_autocast: Callable[[], bool] = known("_C._is_any_autocast_enabled") or _any_autocast
        # Where these cannot be asked for, there is always one: calls are left to the dispatcher, which knows.
        self.function_modes: Callable[[], int] = known("_C._len_torch_function_stack") or _always
        self.dispatch_modes: Callable[[], int] = known("_C._len_torch_dispatch_stack") or _always
        self.transforms: Callable[[], int] = known("_C._are_functorch_transforms_active") or _always
        # PyTorch's own words for these give the interpreter's lock away.
        self.is_negative: Callable[[torch.Tensor], bool] = (
            _reads_mark(known, "Negative") or torch.Tensor.is_neg
        )
        """Whether a tensor's elements are negative by a mark on it."""
        self.is_zero_tensor: Callable[[torch.Tensor], bool] = (
            _reads_mark(known, "ZeroTensor") or torch.Tensor._is_zerotensor
        )
        """Whether a tensor is zeros without memory, as autograd makes them."""
        self.allow_flag_changes: Callable[[], AbstractContextManager[None]] = (
            known("backends.__allow_nonbracketed_mutation") or nullcontext
        )
        """Lets switches be set that `torch.backends.disable_global_flags` has frozen, by who puts them back."""
        self._mode_at = known("_C._get_function_stack_at")
        self._guards = known("_C._dynamo.guards.TensorGuards")
        self._empty = {kind: known(f"_C._dynamo.guards._empty_strided_{kind}") for kind in ("cuda", "cpu")}

    def is_default_device(self) -> bool:
        """Whether the only mode of functions is that of a default device, which tells new tensors where to be."""
        if self.function_modes() != 1 or self._mode_at is None:
            return False
        return type(self._mode_at(0)).__module__ == "torch.utils._device"

    def allocator(self, device: torch.device) -> Allocate:
        """What allocates on that device, which is the current one whenever it is called: what PyTorch's own compiled
        code takes, in a third of the time of torch.empty_strided."""
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
        """What says whether as many tensors are each of the type, size, strides, dtype and device of these, need a
        gradient where these do, and PyTorch's dispatcher would take them the same way."""
        if len({id(tensor) for tensor in tensors}) < len(tensors):  # PyTorch's guards want them all different
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
        return self._comparing(tensors)

    def _comparing(self, tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
        kinds = [(*_kind(one), one.requires_grad, one.is_inference(), False) for one in tensors]

        def holds(*given: torch.Tensor) -> bool:
            if self.dispatch_modes() or self.transforms() or torch.jit.is_tracing():
                return False
            return [
                (*_kind(one), one.requires_grad, one.is_inference(), one.is_neg()) for one in given
            ] == kinds

        return holds

    def recording(self, name: str, forward: Function, backward: Function, kept: Any) -> Function:
        """What calls `forward` with a context and its arguments, so that autograd calls `backward` with that context,
        which has `kept`, and gradients. No transform may be active."""

        def keeping(ctx: Any, *arguments: Any) -> Any:
            ctx.kept = kept
            return forward(ctx, *arguments)

        members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        kind = type(name, (torch.autograd.Function,), members)
        context = getattr(kind, "_backward_cls", None)
        try:
            # Past what Function.apply does for transforms, and what a context does in front of `backward`.
            apply: Function = super(torch.autograd.Function, kind).apply  # type: ignore[misc]
            context.kept, context.apply = kept, backward  # type: ignore[union-attr]
        except (AttributeError, TypeError):
            kind.forward = staticmethod(keeping)  # type: ignore[attr-defined]
            return kind.apply  # type: ignore[attr-defined]
        return apply


def _reads_mark(known: Function, name: str) -> Callable[[torch.Tensor], bool] | None:
    keys, mark = known("_C._dispatch_keys"), known(f"_C.DispatchKey.{name}")
    return None if keys is None or mark is None else lambda tensor: keys(tensor).has(mark)


def _current_stream(index: int) -> int:
    return torch.cuda.current_stream(index).cuda_stream


def _any_autocast() -> bool:
    return any(torch.is_autocast_enabled(kind) for kind in ("cuda", "cpu"))


def _always() -> int:
    return 1


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return type(tensor), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


FAST_PATHS = FastPaths()
