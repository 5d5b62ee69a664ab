"""Casts under autocast: parameters are cast once a step, all that have changed at the same time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from escalade.device.torch_private import FAST_PATHS
from escalade.ops.calling.call_codegen import Source


@dataclass(frozen=True)
class Casts:
    """What autocast makes of a kind of flat arguments, by their places."""

    parameters: Mapping[int, torch.dtype] = field(default_factory=dict)
    """Leaves of autograd's graph: cast behind its back, once for all their uses, and their gradients cast here too."""
    others: Mapping[int, torch.dtype] = field(default_factory=dict)
    settings: Mapping[int, Any] = field(default_factory=dict)
    """What takes the place of arguments that are no tensors."""

    @classmethod
    def between(cls, given: Sequence[Any], settled: Sequence[Any]) -> Casts:
        """What autocast has done where it was given the one arguments and has made the others of them."""
        changed = [place for place in range(len(given)) if given[place] is not settled[place]]
        parameters = [place for place in changed if type(given[place]) is torch.nn.Parameter]
        tensors = [place for place in changed if isinstance(given[place], torch.Tensor)]
        return cls(
            {place: settled[place].dtype for place in parameters},
            {place: settled[place].dtype for place in tensors if place not in parameters},
            {place: settled[place] for place in changed if place not in tensors},
        )

    def write_outside(self, source: Source) -> None:
        """Writes what autograd sees, in lines that have each argument as `a` and its place."""
        for place, dtype in self.others.items():
            source.add(f"a{place} = a{place}.to({source.name(dtype)})")
        for place, setting in self.settings.items():
            source.add(f"a{place} = {source.name(setting)}")

    def write_inside(self, source: Source, cast: Callable[..., torch.Tensor]) -> None:
        """Writes the casts of parameters by that function."""
        for place, dtype in self.parameters.items():
            source.add(f"a{place} = {source.name(cast)}(a{place}, {source.name(dtype)})")


class _Known:
    """A parameter in another dtype, as it was cast last."""

    def __init__(
        self, source: weakref.ref[torch.Tensor], dtype: torch.dtype, device: torch.device, stream: int
    ) -> None:
        self.source = source
        self.place = dtype, device, stream
        self.state: tuple[Any, ...] | None = None
        self.is_wanted = True
        """Whether somebody has asked for it since it was cast."""
        self._waiting: tuple[torch.Tensor, int] | None = None
        self._taken: TensorWeakRef | None = None

    def put(self, cast: torch.Tensor, state: tuple[Any, ...], passes: int) -> None:
        self._waiting, self._taken, self.state, self.is_wanted = (cast, passes), None, state, False

    def take(self, passes: int) -> torch.Tensor | None:
        """The cast: kept until it is first asked for, or a backward pass has begun, whose gradients may change the
        parameter; then only while a graph of autograd holds it."""
        self.is_wanted = True
        if self._waiting is None:
            return None if self._taken is None else self._taken()
        cast, before = self._waiting
        self._waiting = None
        if passes != before:
            return None
        self._taken = TensorWeakRef(cast)
        return cast


class OfThread(threading.local):
    """What a thread has cast."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, torch.dtype, int], _Known] = {}
        """Casts by the parameter, the dtype and the stream: what is cast on one stream is not yet there on another."""
        self.passes = [0]
        """How often a backward pass has come by; a list, for it does so on another thread."""


of_thread = OfThread()


def cast_parameter(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A parameter in that dtype, without a gradient of its own: as it was cast before while a graph still holds it.

    The first of a step to be asked for has all those cast with it, in one launch, that were used in the last. A
    parameter has changed if it was written to in place, or given other memory or another gradient (a write to `.data`
    goes by no version). While a CUDA graph is recorded, whose replays have to do it themselves, and where autocast is
    to keep nothing, each is cast by itself.
    """
    if not torch.is_autocast_cache_enabled() or (parameter.is_cuda and FAST_PATHS.is_capturing()):
        return parameter.to(dtype)
    device, known = parameter.device, of_thread.known
    stream = FAST_PATHS.current_stream(device.index) if device.type == "cuda" else 0
    key = (id(parameter), dtype, stream)
    found, state, passes = known.get(key), _state(parameter), of_thread.passes[0]
    others: list[_Changed] = []
    if found is None or found.source() is not parameter:
        source = weakref.ref(parameter, lambda _: known.pop(key, None))
        found = known[key] = _Known(source, dtype, device, stream)
    elif found.state == state:
        cast = found.take(passes)
        if cast is not None:
            return cast  # else it is used once more in the same step
    else:
        others = _used_and_changed(found)
    _cast_together([(parameter, found, state), *others], dtype, passes)
    cast = found.take(passes)
    assert cast is not None
    return cast


_Changed = tuple[torch.Tensor, _Known, tuple[Any, ...]]


def _state(parameter: torch.Tensor) -> tuple[Any, ...]:
    gradient = parameter.grad
    given = None if gradient is None else (id(gradient), gradient._version)
    return parameter._version, parameter.data_ptr(), given


def _used_and_changed(known: _Known) -> list[_Changed]:
    """The other parameters of the thread, device and stream that have changed; those that nobody has asked for since
    they were cast are forgotten."""
    changed = []
    for key, other in list(of_thread.known.items()):
        source = other.source()
        if other is known or source is None or other.place != known.place:
            continue
        if not other.is_wanted:
            of_thread.known.pop(key, None)
        elif (state := _state(source)) != other.state:
            changed.append((source, other, state))
    return changed


def _cast_together(changed: Sequence[_Changed], dtype: torch.dtype, passes: int) -> None:
    sources = [source.detach() for source, _, _ in changed]
    if len(sources) == 1:  # which is sooner said
        casts = [sources[0].to(dtype)]
    else:
        casts = [torch.empty_like(source, dtype=dtype) for source in sources]
        torch._foreach_copy_(casts, sources)
    for cast, (_, known, state) in zip(casts, changed, strict=True):
        known.put(cast, state, passes)


class Differentiable:
    """A context whose saved parameters are differentiated further: a formula that autograd records is given it."""

    def __init__(self, context: Any, places: Iterable[tuple[int, int]]) -> None:
        """`places`: where each cast parameter stands among the saved tensors and among the context's parameters."""
        self._context = context
        saved = list(context.saved_tensors)
        for place, number in places:
            saved[place] = _StandsFor.apply(context.parameters[number], saved[place])
        self.saved_tensors = tuple(saved)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class _StandsFor(torch.autograd.Function):
    """A cast as it was when it was used, with the gradient of the parameter that was cast."""

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, cast: torch.Tensor) -> torch.Tensor:
        ctx.dtype = parameter.dtype
        return cast.view_as(cast)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        return gradient.to(ctx.dtype), None
