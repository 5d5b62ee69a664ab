"""Casts under autocast: parameters are cast once per step, all changed ones together."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from escalade.device.torch_private import FAST_PATHS
from escalade.ops.calling.call import FunctionSource


@dataclass(frozen=True)
class Casts:
    """Changes that autocast makes to one kind of flattened arguments, by position."""

    parameters: Mapping[int, torch.dtype] = field(default_factory=dict)
    """Leaves, cast outside autograd once for all uses; we cast their gradients back."""
    others: Mapping[int, torch.dtype] = field(default_factory=dict)
    settings: Mapping[int, Any] = field(default_factory=dict)
    """Replacements of arguments that are not tensors."""

    @classmethod
    def between(cls, given: Sequence[Any], cast: Sequence[Any]) -> Casts:
        """Return the changes between the original arguments and the cast ones."""
        changed = [i for i in range(len(given)) if given[i] is not cast[i]]
        parameters = [i for i in changed if type(given[i]) is torch.nn.Parameter]
        tensors = [i for i in changed if isinstance(given[i], torch.Tensor)]
        return cls(
            {i: cast[i].dtype for i in parameters},
            {i: cast[i].dtype for i in tensors if i not in parameters},
            {i: cast[i] for i in changed if i not in tensors},
        )

    def write_outside(self, source: FunctionSource) -> None:
        """Append the casts that autograd records; argument i is variable `a{i}`."""
        for i, dtype in self.others.items():
            source.add(f"a{i} = a{i}.to({source.name(dtype)})")
        for i, setting in self.settings.items():
            source.add(f"a{i} = {source.name(setting)}")

    def write_inside(self, source: FunctionSource, cast: Callable[..., torch.Tensor]) -> None:
        """Append the casts of parameters with the function `cast`."""
        for i, dtype in self.parameters.items():
            source.add(f"a{i} = {source.name(cast)}(a{i}, {source.name(dtype)})")


class _CachedCast:
    """The latest cast of one parameter."""

    def __init__(
        self, source: weakref.ref[torch.Tensor], dtype: torch.dtype, device: torch.device, stream: int
    ) -> None:
        self.source = source
        self.group = dtype, device, stream
        self.state: tuple[Any, ...] | None = None
        self.was_used = True
        """True if used since it was cast."""
        self._pending: tuple[torch.Tensor, int] | None = None
        self._used: TensorWeakRef | None = None

    def put(self, cast: torch.Tensor, state: tuple[Any, ...], passes: int) -> None:
        self._pending, self._used, self.state, self.was_used = (cast, passes), None, state, False

    def take(self, passes: int) -> torch.Tensor | None:
        """Return the cast, or None if it is gone.

        A strong reference lasts until the first use or the next backward pass, whose gradients may change the
        parameter. After that only autograd graphs keep the cast alive.
        """
        self.was_used = True
        if self._pending is None:
            return None if self._used is None else self._used()
        cast, before = self._pending
        self._pending = None
        if passes != before:
            return None
        self._used = TensorWeakRef(cast)
        return cast


class ThreadCasts(threading.local):
    """Cached casts of one thread."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, torch.dtype, int], _CachedCast] = {}
        """Casts by parameter id, dtype and stream. A cast on one stream may not have run yet for another."""
        self.passes = [0]
        """Backward passes so far; a list because autograd increments it from another thread."""


thread_casts = ThreadCasts()


def cast_parameter(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a parameter in another dtype, detached; reuse the cast while a graph holds it.

    The first request of a step casts, in one launch, all changed parameters that the last step used. A parameter has
    changed if it was written in place, or has new storage or a new gradient (writes to `.data` skip the version
    counter). During CUDA graph capture, where replays must repeat the cast, and with autocast's cache disabled, each
    parameter is cast separately.
    """
    if not torch.is_autocast_cache_enabled() or (parameter.is_cuda and FAST_PATHS.is_capturing()):
        return parameter.to(dtype)
    device, known = parameter.device, thread_casts.known
    stream = FAST_PATHS.current_stream(device.index) if device.type == "cuda" else 0
    key = (id(parameter), dtype, stream)
    found, state, passes = known.get(key), _state(parameter), thread_casts.passes[0]
    others: list[_Changed] = []
    if found is None or found.source() is not parameter:
        source = weakref.ref(parameter, lambda _: known.pop(key, None))
        found = known[key] = _CachedCast(source, dtype, device, stream)
    elif found.state == state:
        cast = found.take(passes)
        if cast is not None:
            return cast  # another use in the same step
    else:
        others = _used_and_changed(found)
    _cast_together([(parameter, found, state), *others], dtype, passes)
    cast = found.take(passes)
    assert cast is not None
    return cast


_Changed = tuple[torch.Tensor, _CachedCast, tuple[Any, ...]]


def _state(parameter: torch.Tensor) -> tuple[Any, ...]:
    gradient = parameter.grad
    given = None if gradient is None else (id(gradient), gradient._version)
    return parameter._version, parameter.data_ptr(), given


def _used_and_changed(known: _CachedCast) -> list[_Changed]:
    """Return the other changed parameters of the thread, device and stream; drop those unused since their cast."""
    changed = []
    for key, other in list(thread_casts.known.items()):
        source = other.source()
        if other is known or source is None or other.group != known.group:
            continue
        if not other.was_used:
            thread_casts.known.pop(key, None)
        elif (state := _state(source)) != other.state:
            changed.append((source, other, state))
    return changed


def _cast_together(changed: Sequence[_Changed], dtype: torch.dtype, passes: int) -> None:
    sources = [source.detach() for source, _, _ in changed]
    if len(sources) == 1:  # faster than a foreach of one
        casts = [sources[0].to(dtype)]
    else:
        casts = [torch.empty_like(source, dtype=dtype) for source in sources]
        torch._foreach_copy_(casts, sources)
    for cast, (_, known, state) in zip(casts, changed, strict=True):
        known.put(cast, state, passes)


class DifferentiableContext:
    """An autograd context for double backward: saved casts are tied to the parameters they were cast from."""

    def __init__(self, context: Any, positions: Iterable[tuple[int, int]]) -> None:
        """`positions`: of each cast parameter among the saved tensors and among `context.parameters`."""
        self._context = context
        saved = list(context.saved_tensors)
        for position, number in positions:
            saved[position] = _TiedCast.apply(context.parameters[number], saved[position])
        self.saved_tensors = tuple(saved)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class _TiedCast(torch.autograd.Function):
    """A saved cast whose gradient flows to its parameter."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, cast: torch.Tensor) -> torch.Tensor:
        ctx.dtype = parameter.dtype
        return cast.view_as(cast)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient.to(ctx.dtype), None
