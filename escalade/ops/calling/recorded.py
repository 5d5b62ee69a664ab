"""Calls that autograd takes note of, with as little around them as it allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from escalade.device.torch_private import FAST_PATHS
from escalade.ops.calling.call import Call
from escalade.ops.calling.call_codegen import Source
from escalade.ops.calling.casting import Casts, Differentiable, cast_parameter, of_thread

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
    list_place: int | None,
    casts: Casts,
) -> Function:
    """What runs a call and records its gradient, for arguments of the kind of these, one of which may be a list: it
    takes them flat, those that `casts` makes of them where autograd does not see it."""
    source = Source()
    flat = call.names
    given = ", ".join(f"a{place}" for place in casts.parameters)
    if casts.parameters:
        source.add(f"ctx.parameters = ({given},)")
    casts.write_inside(source, cast_parameter)
    source.add(f"result = {call.write(source)}")
    if gradient.first_alone:
        source.add("ctx.set_materialize_grads(False)")
    if gradient.setup is not None:
        grouped = _grouped(flat, list_place, 0 if list_place is None else len(arguments[list_place]))
        source.add(f"{source.name(gradient.setup)}(ctx, {grouped}, result)")
    source.add("return result")
    forward = source.function("forward", ["ctx", *flat])
    kept = None if gradient.kept is None else gradient.kept(arguments)
    backward = _backward(gradient, arguments, list_place, call.arguments)
    if casts.parameters:
        backward = _casting_back(backward, casts, _saved_parameters(gradient, arguments, list_place, casts))
    return FAST_PATHS.recording(name, forward, backward, kept)


def _grouped(names: Sequence[str], list_place: int | None, in_list: int) -> str:
    """The arguments as the operator takes them, in Python's words."""
    if list_place is None:
        return f"({', '.join(names)},)"
    end = list_place + in_list
    listed = f"[{', '.join(names[list_place:end])}]"
    return f"({', '.join([*names[:list_place], listed, *names[end:]])},)"


def _backward(gradient: Gradient, arguments: Sequence[Any], list_place: int | None, count: int) -> Function:
    """The formula, with what it is to be told and to return where a list is among the arguments, or where the only
    gradient that counts may be none."""
    formula, first_alone = gradient.formula, gradient.first_alone
    if list_place is None and not first_alone:
        return formula
    end = None if list_place is None else list_place + len(arguments[list_place])

    def backward(ctx: Any, *gradients: Any) -> Sequence[Any]:
        if first_alone and gradients[0] is None:
            return (None,) * count
        needs = ctx.needs_input_grad
        if list_place is not None and not isinstance(
            needs[list_place], tuple
        ):  # as it is after the first time
            ctx.needs_input_grad = (*needs[:list_place], needs[list_place:end], *needs[end:])
        return flattened(formula(ctx, *gradients), list_place)

    return backward


def _casting_back(formula: Function, casts: Casts, saved: Sequence[tuple[int, int]]) -> Function:
    """The gradients of a formula, those of cast parameters in the parameters' dtype."""
    places, passes = tuple(casts.parameters), of_thread.passes

    def backward(ctx: Any, *gradients: Any) -> Sequence[Any]:
        passes[0] += 1
        context = Differentiable(ctx, saved) if torch.is_grad_enabled() else ctx
        found = list(formula(context, *gradients))
        for place, parameter in zip(places, ctx.parameters, strict=True):
            one = found[place]
            if one is not None:
                found[place] = one.to(parameter.dtype)
        return tuple(found)

    return backward


def _saved_parameters(
    gradient: Gradient, arguments: Sequence[Any], list_place: int | None, casts: Casts
) -> list[tuple[int, int]]:
    """Where cast parameters stand among the tensors that are saved, and which of them each is."""
    if gradient.setup is None:
        return []
    noting, flat = _Noting(), flattened(arguments, list_place)
    gradient.setup(noting, arguments, None)
    return [
        (place, number)
        for place, saved in enumerate(noting.saved)
        for number, at in enumerate(casts.parameters)
        if saved is flat[at]
    ]


class _Noting:
    """In the place of a context, to see what is saved."""

    saved: tuple[Any, ...] = ()

    def save_for_backward(self, *saved: Any) -> None:
        self.saved = saved


def flattened(arguments: Sequence[Any], list_place: int | None) -> Sequence[Any]:
    """The arguments, or what stands for each of them, those of the list one by one."""
    if list_place is None:
        return arguments
    return (*arguments[:list_place], *arguments[list_place], *arguments[list_place + 1 :])
