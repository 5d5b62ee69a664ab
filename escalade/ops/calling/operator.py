"""An operator as Python calls it: by the shortest way that PyTorch's present state allows.

Registered operators go through PyTorch's dispatcher, which takes longer than a small kernel. Where nothing but autograd
is to be heeded, as in plain eager code, a call looks up what was made ready for its kind of arguments and launches it;
everything else (tracing, transforms, modes, subclasses of tensors, other devices) is left to the dispatcher.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from escalade.ops.calling.call import Call, Plan
from escalade.ops.calling.executables import keep, per_thread
from escalade.ops.calling.recorded import recording

Function = Callable[..., Any]
_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_SINGLE = ("Tensor", "Optional[Tensor]")
_LIST = "List[Tensor]"
_dispatch_modes = torch._C._len_torch_dispatch_stack
_function_modes = torch._C._len_torch_function_stack
_transforms = torch._C._are_functorch_transforms_active
_tracing = torch._C._get_tracing_state
_any_autocast = torch._C._is_any_autocast_enabled
_grad_enabled = torch._C.is_grad_enabled


class Operator:
    """What `torch.ops.escalade` has under a name; a call takes all of its arguments, in their order, sequences of
    numbers as tuples."""

    def __init__(self, name: str, plan: Function) -> None:
        self._packet = getattr(torch.ops.escalade, name)
        self._plan = plan
        arguments = self._packet.default._schema.arguments
        kinds = [str(argument.type) for argument in arguments]
        self._names = [argument.name for argument in arguments]
        self._defaults = [argument.default_value for argument in arguments]
        self._tensors = [place for place, kind in enumerate(kinds) if kind in _SINGLE]
        self._list = kinds.index(_LIST) if _LIST in kinds else None
        self._casting: Function | None = None
        self._apply: Function | None = None

    def __call__(self, *arguments: Any) -> Any:
        if (
            torch.compiler.is_compiling()
            or _dispatch_modes()
            or _function_modes()
            or _transforms()
            or _tracing() is not None
        ):
            return self._packet(*arguments)
        if self._casting is not None and _any_autocast():
            device = arguments[0].device.type
            if torch.is_autocast_enabled(device):
                arguments = self._casting(torch.get_autocast_dtype(device), *arguments)
        key = [self, *arguments]
        needs_gradient = False
        for place in self._tensors:
            tensor = arguments[place]
            if tensor is not None:
                if type(tensor) not in _PLAIN:
                    return self._packet(*arguments)
                key[place + 1] = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
                needs_gradient = needs_gradient or tensor.requires_grad
        if self._list is not None:
            for tensor in arguments[self._list]:
                if type(tensor) not in _PLAIN:
                    return self._packet(*arguments)
                needs_gradient = needs_gradient or tensor.requires_grad
            key[self._list + 1] = _kinds(arguments[self._list])
        call = per_thread.calls.get(tuple(key))
        if call is None or call.is_elsewhere():  # the dispatcher's call makes it ready
            return self._packet(*arguments)
        if needs_gradient and _grad_enabled():
            return (
                self._packet(*arguments) if self._apply is None else self._apply(*self._flat(arguments), call)
            )
        return call(self._flat(arguments))

    def run(self, *arguments: Any) -> Any:
        """What the dispatcher calls for a processor; it leaves out arguments at the end that have their defaults."""
        given = (*arguments, *self._defaults[len(arguments) :])
        settled: tuple[Any, ...] = hashable(given)
        key: list[Any] = [self, *settled]
        for place in self._tensors:
            if settled[place] is not None:
                (key[place + 1],) = _kinds((settled[place],))
        if self._list is not None:
            key[self._list + 1] = _kinds(settled[self._list])
        call = per_thread.calls.get(tuple(key))
        if call is None:
            call = self._made(settled)
            keep(per_thread.calls, tuple(key), call)
        return call(self._flat(settled))

    def _made(self, arguments: Sequence[Any]) -> Call:
        plan: Plan = self._plan(*arguments)
        named = {place: self._names[place] for place in self._tensors}
        buffers = {place: plan.renamed.get(name, name) for place, name in named.items()}
        if self._list is not None:
            count = len(arguments[self._list])
            buffers = {place + (count - 1) * (place > self._list): name for place, name in buffers.items()}
            buffers |= {self._list + number: name for number, name in enumerate(plan.names)}
        return Call(plan, arguments[0].device, buffers, self._flat(arguments))

    def _flat(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """The arguments, those of a list one by one."""
        place = self._list
        return (
            arguments if place is None else (*arguments[:place], *arguments[place], *arguments[place + 1 :])
        )

    def differentiate(self, setup: Function | None, formula: Function, first_alone: bool) -> None:
        """Gives it the gradient that the dispatcher has too; `first_alone`: of the first result only."""
        name = f"{self._packet.__name__}_recorded"
        self._apply = recording(name, len(self._names), self._list, setup, formula, first_alone)

    def cast_under_autocast(self, casting: Function) -> None:
        """`casting` gives the arguments that take the place of the operator's, of which a dtype stands in front."""
        self._casting = casting


def hashable(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments, with tuples for the lists that the dispatcher gives."""
    return tuple([tuple(one) if isinstance(one, list) else one for one in arguments])


def _kinds(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return tuple([(one.shape, one.stride(), one.dtype, one.device) for one in tensors])
