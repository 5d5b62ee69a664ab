"""Calls recorded by autograd with minimal overhead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from escalade.device.torch_private import FAST_PATHS
from escalade.ops.calling.call import FunctionSource, PreparedCall
from escalade.ops.calling.casting import Casts, DifferentiableContext, cast_parameter, thread_casts

Function = Callable[..., Any]


@dataclass(frozen=True)
class Gradient:
    """The gradient of an operator, as `torch.library.register_autograd` takes it."""

    setup: Function | None
    formula: Function
    kept: Function | None
    """Maps the arguments to what the formula reads as `ctx.kept`; depends only on their kind."""
    first_alone: bool
    """True if only the first result is differentiable; no zeros are materialized for the others."""


def recording(
    name: str,
    gradient: Gradient,
    call: PreparedCall,
    arguments: Sequence[Any],
    list_at: int | None,
    casts: Casts,
) -> Function:
    """Return a function of flattened arguments of this kind that runs a call and records its gradient.

    `list_at` is the position of a list argument. Parameters in `casts` are cast outside autograd.
    """
    source = FunctionSource()
    flat = call.names
    given = ", ".join(f"a{i}" for i in casts.parameters)
    if casts.parameters:
        source.add(f"ctx.parameters = ({given},)")
    casts.write_inside(source, cast_parameter)
    source.add(f"result = {call.write(source)}")
    if gradient.first_alone:
        source.add("ctx.set_materialize_grads(False)")
    if gradient.setup is not None:
        grouped = _grouped(flat, list_at, 0 if list_at is None else len(arguments[list_at]))
        source.add(f"{source.name(gradient.setup)}(ctx, {grouped}, result)")
    source.add("return result")
    forward = source.function("forward", ["ctx", *flat])
    kept = None if gradient.kept is None else gradient.kept(arguments)
    backward = _backward(gradient, arguments, list_at, call.arguments)
    if casts.parameters:
        backward = _casting_back(backward, casts, _saved_parameters(gradient, arguments, list_at, casts))
    return FAST_PATHS.recording(name, forward, backward, kept)


def _grouped(names: Sequence[str], list_at: int | None, in_list: int) -> str:
    """Return the operator's unflattened arguments as Python source."""
    if list_at is None:
        return f"({', '.join(names)},)"
    end = list_at + in_list
    items = f"[{', '.join(names[list_at:end])}]"
    return f"({', '.join([*names[:list_at], items, *names[end:]])},)"


def _backward(gradient: Gradient, arguments: Sequence[Any], list_at: int | None, count: int) -> Function:
    """Adapt the formula to a flattened list argument, and to a missing gradient of the first result."""
    formula, first_alone = gradient.formula, gradient.first_alone
    if list_at is None and not first_alone:
        return formula
    end = None if list_at is None else list_at + len(arguments[list_at])

    def backward(ctx: Any, *gradients: Any) -> Sequence[Any]:
        if first_alone and gradients[0] is None:
            return (None,) * count
        needs = ctx.needs_input_grad
        # Already grouped if this is not the first backward through the graph.
        if list_at is not None and not isinstance(needs[list_at], tuple):
            ctx.needs_input_grad = (*needs[:list_at], needs[list_at:end], *needs[end:])
        return flatten(formula(ctx, *gradients), list_at)

    return backward


def _casting_back(formula: Function, casts: Casts, saved: Sequence[tuple[int, int]]) -> Function:
    """Return the formula with gradients of cast parameters in the parameters' dtypes."""
    positions, passes = tuple(casts.parameters), thread_casts.passes

    def backward(ctx: Any, *gradients: Any) -> Sequence[Any]:
        passes[0] += 1
        context = DifferentiableContext(ctx, saved) if torch.is_grad_enabled() else ctx
        found = list(formula(context, *gradients))
        for position, parameter in zip(positions, ctx.parameters, strict=True):
            one = found[position]
            if one is not None:
                found[position] = one.to(parameter.dtype)
        return tuple(found)

    return backward


def _saved_parameters(
    gradient: Gradient, arguments: Sequence[Any], list_at: int | None, casts: Casts
) -> list[tuple[int, int]]:
    """Return (index among saved tensors, index among cast parameters) of every saved cast parameter."""
    if gradient.setup is None:
        return []
    recorder, flat = _SaveRecorder(), flatten(arguments, list_at)
    gradient.setup(recorder, arguments, None)
    return [
        (index, number)
        for index, saved in enumerate(recorder.saved)
        for number, at in enumerate(casts.parameters)
        if saved is flat[at]
    ]


class _SaveRecorder:
    """Stand-in for a context that records what is saved."""

    saved: tuple[Any, ...] = ()

    def save_for_backward(self, *saved: Any) -> None:
        self.saved = saved


def flatten(arguments: Sequence[Any], list_at: int | None) -> Sequence[Any]:
    """Splice the list argument, if any, into the arguments."""
    if list_at is None:
        return arguments
    return (*arguments[:list_at], *arguments[list_at], *arguments[list_at + 1 :])
