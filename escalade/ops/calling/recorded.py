"""Calls that autograd takes note of, with as little around them as it allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from escalade.ops.calling.call import Call

Function = Callable[..., Any]


@dataclass(frozen=True)
class Gradient:
    """The gradient of an operator, as `torch.library.register_autograd` takes it."""

    setup: Function | None
    formula: Function
    kept: Function | None
    """What it keeps of the arguments that follows from their kind alone, for the formula to find as `ctx.kept`."""
    first_alone: bool
    """Whether the first result is the only one that has a gradient; no zeros are made then in the place of others'."""


def recording(
    name: str,
    gradient: Gradient,
    call: Call,
    arguments: Sequence[Any],
    places: Sequence[int],
    grouping: Grouping,
) -> Function:
    """What runs a call and records its gradient, for arguments of the kind of these: it takes the tensors that stand at
    `places` of the flat arguments, then the arguments and the same flat."""
    setup, formula, first_alone = gradient.setup, gradient.formula, gradient.first_alone
    count, places = len(places) + 1, tuple(places)
    in_order = grouping.list_place is None and places == tuple(range(len(places)))

    def forward(ctx: Any, *given: Any) -> Any:
        arguments, flat = given[-1]
        result = call.run(flat)
        if first_alone:
            ctx.set_materialize_grads(False)
        if setup is not None:
            setup(ctx, arguments, result)
        return result

    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        if first_alone and gradients[0] is None:
            return (None,) * count
        if not in_order:
            ctx.needs_input_grad = grouping.needed(places, ctx.needs_input_grad)
        found = flattened(formula(ctx, *gradients), grouping.list_place)
        return (*found[: count - 1], None) if in_order else (*[found[place] for place in places], None)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    kind = type(name, (torch.autograd.Function,), members)
    if gradient.kept is not None:  # once for all contexts
        kind._backward_cls.kept = gradient.kept(arguments)  # type: ignore[attr-defined]
    # Past what Function.apply does for transforms: whoever calls this has seen that none is active.
    apply: Function = super(torch.autograd.Function, kind).apply  # type: ignore[misc]
    return apply


def flattened(arguments: Sequence[Any], list_place: int | None) -> Sequence[Any]:
    """The arguments, or what stands for each of them, those of the list one by one."""
    if list_place is None:
        return arguments
    return (*arguments[:list_place], *arguments[list_place], *arguments[list_place + 1 :])


@dataclass(frozen=True)
class Grouping:
    """How the arguments of an operator, one of which may be a list, lie when they are flat: those of the list one by
    one."""

    list_place: int | None
    in_list: int
    arguments: int

    def needed(self, places: Sequence[int], needs: Sequence[bool]) -> tuple[Any, ...]:
        """Whether a gradient is needed, for each argument, from that of the tensors at these flat places."""
        length = self.arguments if self.list_place is None else self.arguments - 1 + self.in_list
        flags = [False] * length
        for place, flag in zip(places, needs, strict=False):
            flags[place] = flag
        if self.list_place is None:
            return tuple(flags)
        end = self.list_place + self.in_list
        return (*flags[: self.list_place], flags[self.list_place : end], *flags[end:])
