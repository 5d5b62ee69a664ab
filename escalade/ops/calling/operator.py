"""An operator as Python calls it: by the shortest way that PyTorch's present state allows.

Registered operators go through PyTorch's dispatcher, which takes longer than a small kernel. Where nothing but autograd
is to be heeded, as in plain eager code, a call looks up what was made ready for its kind of arguments and launches it;
everything else (tracing, transforms, modes, subclasses of tensors, other devices) is left to the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch

from escalade.device.torch_private import FAST_PATHS
from escalade.ops.calling.call import Call, Plan
from escalade.ops.calling.call_codegen import Source
from escalade.ops.calling.casting import Casts
from escalade.ops.calling.executables import keep, per_thread
from escalade.ops.calling.recorded import Gradient, flattened, recording
from escalade.ops.calling.types import PLAIN, Types

Function = Callable[..., Any]
_SINGLE = ("Tensor", "Optional[Tensor]")
_LIST = "List[Tensor]"
_MOST_KINDS = 16  # of calls with the same settings and sizes of the first tensor; the latest stays
_is_compiling = torch.compiler.is_compiling
_MISSED = object()
"""What a kind of call returns for arguments of another kind."""


class Operator:
    """What `torch.ops.escalade` has under a name; a call takes all of its arguments, in their order, sequences of
    numbers as tuples."""

    def __init__(self, name: str, plan: Function) -> None:
        self._packet = getattr(torch.ops.escalade, name)
        self._plan = plan
        self._types = Types(self._packet)
        arguments = self._packet.default._schema.arguments
        kinds = [str(argument.type) for argument in arguments]
        self._names = [argument.name for argument in arguments]
        self._defaults = [argument.default_value for argument in arguments]
        self._tensors = [place for place, kind in enumerate(kinds) if kind in _SINGLE]
        self._list = kinds.index(_LIST) if _LIST in kinds else None
        self._settings = _getter([place for place, kind in enumerate(kinds) if kind not in (*_SINGLE, _LIST)])
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
            roughly = (self, first.shape, len(flat), self._settings(arguments), dtype)
            for kind in per_thread.guarded.get(roughly, ()):
                result = kind(flat)
                if result is not _MISSED:
                    return result
            return self._unguarded(arguments, flat, roughly, dtype)
        except (AttributeError, TypeError, RuntimeError) as error:
            self._types.require(arguments, error)
            raise

    def _unguarded(
        self,
        arguments: Sequence[Any],
        flat: Sequence[Any],
        roughly: tuple[Any, ...],
        dtype: torch.dtype | None,
    ) -> Any:
        """The first calls with a kind of arguments: the dispatcher's makes it ready, the next puts a guard to it.

        With a dtype, arguments are cast to that.
        """
        tensors = [one for one in flat if isinstance(one, torch.Tensor)]
        if (
            FAST_PATHS.dispatch_modes()
            or FAST_PATHS.transforms()
            or torch.jit.is_tracing()
            or any(type(tensor) not in PLAIN or tensor.is_neg() for tensor in tensors)
        ):
            return self._packet(*arguments)
        settled, casts = arguments, Casts()
        if dtype is not None and self._casting is not None:
            with torch.no_grad():
                settled = self._casting(dtype, *arguments)
            casts = Casts.between(flat, self._flat(settled))
        call = per_thread.calls.get(self._key(settled))
        if call is None or (call.index is not None and FAST_PATHS.current_device() != call.index):
            return self._packet(*arguments)
        record = None
        if any(tensor.requires_grad for tensor in tensors):
            if self._gradient is None:
                return self._packet(*arguments)
            name = f"{self._packet.__name__}_recorded"
            record = recording(name, self._gradient, call, settled, self._list, casts)
        known = per_thread.guarded.get(roughly)
        if known is None:
            known = []
            keep(per_thread.guarded, roughly, known)
        known.insert(0, _kind(call, flat, list(self._places(arguments)), record, casts))
        del known[_MOST_KINDS:]
        return self._packet(*arguments)

    def _key(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """All that what is made ready depends on."""
        key: list[Any] = [self, *arguments]
        for place in self._tensors:
            if arguments[place] is not None:
                (key[place + 1],) = _kinds((arguments[place],))
        if self._list is not None:
            key[self._list + 1] = _kinds(arguments[self._list])
        return tuple(key)

    def run(self, *arguments: Any) -> Any:
        """What the dispatcher calls for a processor; it leaves out arguments at the end that have their defaults."""
        given = (*arguments, *self._defaults[len(arguments) :])
        settled: tuple[Any, ...] = hashable(given)
        key = self._key(settled)
        call = per_thread.calls.get(key)
        if call is None:
            call = self._made(settled)
            keep(per_thread.calls, key, call)
        return call.run(self._flat(settled))

    def _made(self, arguments: Sequence[Any]) -> Call:
        plan: Plan = self._plan(*arguments)
        named = self._places(arguments)
        buffers = {place: plan.renamed.get(name, name) for place, name in named.items()}
        if self._list is not None:
            buffers |= {self._list + number: name for number, name in enumerate(plan.names)}
        return Call(plan, arguments[0].device, buffers, self._flat(arguments))

    def _places(self, arguments: Sequence[Any]) -> dict[int, str]:
        """Where single tensors stand, or may stand, among the flat arguments, and what they are called."""
        list_place = self._list
        if list_place is None:
            return {place: self._names[place] for place in self._tensors}
        further = len(arguments[list_place]) - 1
        return {place + further * (place > list_place): self._names[place] for place in self._tensors}

    def _flat(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """The arguments, those of a list one by one."""
        return flattened(arguments, self._list)

    def differentiate(self, gradient: Gradient) -> None:
        """Gives it the gradient that the dispatcher has too."""
        self._gradient = gradient

    def cast_under_autocast(self, casting: Function) -> None:
        """`casting` gives the arguments that take the place of the operator's, of which a dtype stands in front."""
        self._casting = casting


def _kind(
    call: Call, flat: Sequence[Any], singles: Sequence[int], record: Function | None, casts: Casts
) -> Function:
    """A call behind a guard, which holds for tensors of the same kind as these and the same modes of PyTorch.

    It takes the flat arguments, of which `casts` makes those of the call. `singles` are the places of tensors that may
    be absent; `record` is what takes the place of the call where autograd is to know of it.
    """
    source = Source()
    places = [place for place, one in enumerate(flat) if isinstance(one, torch.Tensor)]
    present = ", ".join(f"a{place}" for place in places)
    conditions = [f"{source.name(FAST_PATHS.guard([flat[place] for place in places]))}({present})"]
    conditions += [f"a{place} is None" for place in singles if flat[place] is None]
    if call.index is not None and torch.cuda.device_count() > 1:
        conditions.append(f"{source.name(FAST_PATHS.current_device)}() == {call.index}")
    source.add(call.unpacked("arguments"))
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


def _getter(places: Sequence[int]) -> Function:
    """What takes those elements out of a sequence, as a tuple."""
    if len(places) > 1:
        return itemgetter(*places)
    if not places:
        return lambda _: ()
    (place,) = places
    return lambda sequence: (sequence[place],)


def hashable(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments, with tuples for the lists that the dispatcher gives."""
    return tuple([tuple(one) if isinstance(one, list) else one for one in arguments])


def _kinds(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return tuple([(one.shape, one.stride(), one.dtype, one.device) for one in tensors])
