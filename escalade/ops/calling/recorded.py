"""Calls that autograd takes note of, with as little around them as it allows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from escalade.device.pytorch import WORDS
from escalade.ops.calling.call import Call
from escalade.ops.calling.straight import Source

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
    name: str, gradient: Gradient, call: Call, arguments: Sequence[Any], list_place: int | None
) -> Function:
    """What runs a call and records its gradient, for arguments of the kind of these, one of which may be a list: it
    takes them flat."""
    source = Source()
    flat = call.names
    source.add(f"result = {call.write(source)}")
    if gradient.first_alone:
        source.add("ctx.set_materialize_grads(False)")
    if gradient.setup is not None:
        given = _grouped(flat, list_place, 0 if list_place is None else len(arguments[list_place]))
        source.add(f"{source.name(gradient.setup)}(ctx, {given}, result)")
    source.add("return result")
    forward = source.function("forward", ["ctx", *flat])
    kept = None if gradient.kept is None else gradient.kept(arguments)
    return WORDS.recording(name, forward, _backward(gradient, arguments, list_place, call.arguments), kept)


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
        if list_place is not None:
            needs = ctx.needs_input_grad
            ctx.needs_input_grad = (*needs[:list_place], needs[list_place:end], *needs[end:])
        return flattened(formula(ctx, *gradients), list_place)

    return backward


def flattened(arguments: Sequence[Any], list_place: int | None) -> Sequence[Any]:
    """The arguments, or what stands for each of them, those of the list one by one."""
    if list_place is None:
        return arguments
    return (*arguments[:list_place], *arguments[list_place], *arguments[list_place + 1 :])
