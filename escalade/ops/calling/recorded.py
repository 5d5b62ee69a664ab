"""Calls that autograd takes note of, with as little around them as it allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

Function = Callable[..., Any]


def recording(
    name: str,
    arguments: int,
    list_place: int | None,
    setup: Function | None,
    formula: Function,
    first_alone: bool,
) -> Function:
    """What calls a `Call` and records its gradient: it takes the arguments of the operator, those of its list one by
    one, and last the call.

    `setup` and `formula` are as `torch.library.register_autograd` takes them. With `first_alone`, the first result is
    the only one that has a gradient, and no zeros are made in the place of the others'.
    """

    def forward(ctx: Any, *given: Any) -> Any:
        result = given[-1](given)
        if first_alone:
            ctx.set_materialize_grads(False)
        if setup is not None:
            setup(ctx, _grouped(given[:-1], arguments, list_place), result)
        return result

    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        count = len(ctx.needs_input_grad)
        if first_alone and gradients[0] is None:
            return (None,) * count
        if list_place is not None:
            ctx.needs_input_grad = _grouped(ctx.needs_input_grad[:-1], arguments, list_place)
        found = formula(ctx, *gradients)
        if list_place is not None:
            found = (*found[:list_place], *found[list_place], *found[list_place + 1 :])
        return found if len(found) == count else (*found, None)

    kind = type(
        name,
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )
    # Past what Function.apply does for transforms: whoever calls this has seen that none is active.
    apply: Function = super(torch.autograd.Function, kind).apply  # type: ignore[misc]
    return apply


def _grouped(flat: Sequence[Any], arguments: int, list_place: int | None) -> tuple[Any, ...]:
    """The arguments of the operator, a list in its place again."""
    if list_place is None:
        return tuple(flat)
    end = list_place + len(flat) - arguments + 1
    return (*flat[:list_place], list(flat[list_place:end]), *flat[end:])
