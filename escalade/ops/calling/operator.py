"""Eager operator calls with as little overhead as PyTorch's current state allows.

The dispatcher costs more time than a small kernel. In plain eager code, with at most autograd active, a call finds the
prepared call of its kind of arguments and launches it. Everything else (tracing, transforms, modes, tensor subclasses,
other devices) goes through the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from escalade.device.torch_private import FAST_PATHS
from escalade.ops.calling.call import CallPlan, FunctionSource, PreparedCall
from escalade.ops.calling.casting import Casts
from escalade.ops.calling.executables import keep, per_thread
from escalade.ops.calling.recorded import Gradient, flatten, recording
from escalade.ops.calling.types import PLAIN, ArgumentTypes

Function = Callable[..., Any]
_SINGLE = ("Tensor", "Optional[Tensor]")
_LIST = "List[Tensor]"
_MAX_KINDS = 16  # guarded calls per coarse key; keeps the most recent
_is_compiling = torch.compiler.is_compiling
_MISSED = object()  # returned by a guarded call whose guard fails


class Operator:
    """Fast callable of an operator in `torch.ops.escalade`. All arguments are positional, number lists are tuples."""

    def __init__(self, name: str, plan: Function) -> None:
        self._packet = getattr(torch.ops.escalade, name)
        self._plan = plan
        self._types = ArgumentTypes(self._packet)
        arguments = self._packet.default._schema.arguments
        kinds = [str(argument.type) for argument in arguments]
        self._names = [argument.name for argument in arguments]
        self._defaults = [argument.default_value for argument in arguments]
        self._tensors = [i for i, kind in enumerate(kinds) if kind in _SINGLE]
        self._list = kinds.index(_LIST) if _LIST in kinds else None
        self._rung = self._names.index("rung") if "rung" in self._names else None
        self._settings = _getter([i for i, kind in enumerate(kinds) if kind not in (*_SINGLE, _LIST)])
        self._casting: Function | None = None
        self._gradient: Gradient | None = None

    def __call__(self, *arguments: Any) -> Any:
        if _is_compiling() or (FAST_PATHS.function_modes() and not FAST_PATHS.is_default_device()):
            return self._packet(*arguments)
        first, dtype = arguments[0], None
        try:
            if type(first) not in PLAIN:
                return self._packet(*arguments)
            flat = arguments if self._list is None else self._flat(arguments)
            if self._casting is not None and FAST_PATHS.any_autocast():
                device = first.device.type
                dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            coarse_key = (self, first.shape, len(flat), self._settings(arguments), dtype)
            for guarded in per_thread.guarded.get(coarse_key, ()):
                result = guarded(flat)
                if result is not _MISSED:
                    return result
            return self._unguarded(arguments, flat, coarse_key, dtype)
        except (AttributeError, TypeError, RuntimeError) as error:
            self._types.require(arguments, error)
            raise

    def _unguarded(
        self,
        arguments: Sequence[Any],
        flat: Sequence[Any],
        coarse_key: tuple[Any, ...],
        dtype: torch.dtype | None,
    ) -> Any:
        """Run through the dispatcher. The first call of a kind prepares it, the second adds a guard.

        `dtype` is autocast's, None if disabled.
        """
        tensors = [one for one in flat if isinstance(one, torch.Tensor)]
        if (
            FAST_PATHS.dispatch_modes()
            or FAST_PATHS.transforms()
            or torch.jit.is_tracing()
            or any(type(tensor) not in PLAIN or tensor.is_neg() for tensor in tensors)
        ):
            return self._packet(*arguments)
        cast_arguments, casts = arguments, Casts()
        if dtype is not None and self._casting is not None:
            with torch.no_grad():
                cast_arguments = self._casting(dtype, *arguments)
            casts = Casts.between(flat, self._flat(cast_arguments))
        call = per_thread.calls.get(self._key(cast_arguments))
        if call is None or (call.index is not None and FAST_PATHS.current_device() != call.index):
            return self._packet(*arguments)
        record = None
        if any(tensor.requires_grad for tensor in tensors):
            if self._gradient is None:
                return self._packet(*arguments)
            name = f"{self._packet.__name__}_recorded"
            record = recording(name, self._gradient, call, cast_arguments, self._list, casts)
        known = per_thread.guarded.get(coarse_key)
        if known is None:
            known = []
            keep(per_thread.guarded, coarse_key, known)
        known.insert(0, _guarded(call, flat, list(self._positions(arguments)), record, casts))
        del known[_MAX_KINDS:]
        return self._packet(*arguments)

    def _key(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """Return everything that a prepared call depends on."""
        key: list[Any] = [self, *arguments]
        for position in self._tensors:
            if arguments[position] is not None:
                (key[position + 1],) = _kinds((arguments[position],))
        if self._list is not None:
            key[self._list + 1] = _kinds(arguments[self._list])
        return tuple(key)

    def run(self, *arguments: Any) -> Any:
        """Run for the dispatcher, which omits trailing arguments that equal their defaults."""
        full: tuple[Any, ...] = hashable((*arguments, *self._defaults[len(arguments) :]))
        key = self._key(full)
        call = per_thread.calls.get(key)
        if call is None:
            call = self._prepare(full)
            keep(per_thread.calls, key, call)
        return call.run(self._flat(full))

    def _prepare(self, arguments: Sequence[Any]) -> PreparedCall:
        plan: CallPlan = self._plan(*arguments)
        named = self._positions(arguments)
        buffers = {position: plan.renamed.get(name, name) for position, name in named.items()}
        if self._list is not None:
            buffers |= {self._list + number: name for number, name in enumerate(plan.names)}
        rung = None if self._rung is None else arguments[self._rung]
        return PreparedCall(plan, arguments[0].device, buffers, self._flat(arguments), rung)

    def _positions(self, arguments: Sequence[Any]) -> dict[int, str]:
        """Return names of (optional) single-tensor arguments by position among the flattened arguments."""
        at = self._list
        if at is None:
            return {position: self._names[position] for position in self._tensors}
        shift = len(arguments[at]) - 1
        return {position + shift * (position > at): self._names[position] for position in self._tensors}

    def _flat(self, arguments: Sequence[Any]) -> Sequence[Any]:
        return flatten(arguments, self._list)

    def differentiate(self, gradient: Gradient) -> None:
        """Set the gradient, which the dispatcher has too."""
        self._gradient = gradient

    def cast_under_autocast(self, casting: Function) -> None:
        """Set the function from a dtype and the arguments to the arguments under autocast."""
        self._casting = casting


def _guarded(
    call: PreparedCall, flat: Sequence[Any], singles: Sequence[int], record: Function | None, casts: Casts
) -> Function:
    """Generate a call behind a guard for tensors of the same kind and the same PyTorch modes.

    It takes the flattened arguments before `casts`. `singles` are positions of optional tensors; `record` replaces the
    call if autograd records.
    """
    source = FunctionSource()
    places = [i for i, one in enumerate(flat) if isinstance(one, torch.Tensor)]
    present = ", ".join(f"a{i}" for i in places)
    conditions = [f"{source.name(FAST_PATHS.guard([flat[i] for i in places]))}({present})"]
    conditions += [f"a{i} is None" for i in singles if flat[i] is None]
    if call.index is not None and torch.cuda.device_count() > 1:
        conditions.append(f"{source.name(FAST_PATHS.current_device)}() == {call.index}")
    source.add(call.unpack_line("arguments"))
    source.add(f"if not ({' and '.join(conditions)}):", f"    return {source.name(_MISSED)}")
    casts.write_outside(source)
    if record is not None:
        names = ", ".join(call.names)
        source.add(
            f"if {source.name(torch.is_grad_enabled)}():", f"    return {source.name(record)}({names})"
        )
    casts.write_inside(source, torch.Tensor.to)
    source.add(f"return {call.write(source)}")
    return source.function("call", ["arguments"])


def _getter(positions: Sequence[int]) -> Function:
    """Return a function that extracts those items of a sequence as a tuple."""
    if len(positions) > 1:
        return itemgetter(*positions)
    if not positions:
        return lambda _: ()
    (position,) = positions
    return lambda sequence: (sequence[position],)


def hashable(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Replace the dispatcher's lists by tuples."""
    return tuple([tuple(one) if isinstance(one, list) else one for one in arguments])


def _kinds(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return tuple([(one.shape, one.stride(), one.dtype, one.device) for one in tensors])
