"""Operators registered with PyTorch: one function for the CPU (the twin) and CUDA, a fake, and a gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.operation import Operation
from escalade.ops.calling.operator import Operator, hashable
from escalade.ops.calling.recorded import Gradient
from escalade.ops.calling.types import Types

library = torch.library.Library("escalade", "FRAGMENT")
Function = Callable[..., Any]
_operators: dict[str, Operator] = {}


class Registered:
    """An operator that the dispatcher runs, as Python calls it: with all of its arguments, in their order."""

    def __init__(self, name: str) -> None:
        self._packet = getattr(torch.ops.escalade, name)
        self._types = Types(self._packet)

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._packet(*arguments)
        try:
            return self._packet(*arguments)
        except (AttributeError, TypeError, RuntimeError) as error:
            self._types.require(arguments, error)
            raise


def define(
    schema: str,
    run: Function,
    fake: Function,
    *,
    setup: Function | None = None,
    backward: Function | None = None,
) -> Registered:
    """An operator that changes none of its arguments; the first one's device is where it runs."""
    name = _define(schema, run)
    torch.library.register_fake(f"escalade::{name}", fake, lib=library)
    if backward is not None:
        define_gradient(name, setup, backward)
    return Registered(name)


def define_planned(
    schema: str,
    plan: Function,
    fake: Function,
    *,
    setup: Function | None = None,
    backward: Function | None = None,
    kept: Function | None = None,
) -> Operator:
    """An operator that changes none of its arguments, and what Python calls in its place.

    `plan` is given all arguments and says what a call with such tensors and settings does (`Plan`); buffers have the
    names of the arguments.
    """
    name = schema.partition("(")[0]

    def run(*arguments: Any) -> Any:
        return _operators[name].run(*arguments)

    _define(schema, run)
    _operators[name] = Operator(name, plan)
    torch.library.register_fake(f"escalade::{name}", fake, lib=library)
    if backward is not None:
        define_gradient(name, setup, backward, kept=kept)
    return _operators[name]


def operator(name: str) -> Operator:
    """What `define_planned` has made, for those who cannot import each other."""
    return _operators[name]


def define_gradient(
    name: str,
    setup: Function | None,
    backward: Function,
    *,
    kept: Function | None = None,
    first_alone: bool = False,
) -> None:
    """The gradient of a defined operator; `first_alone`: of its first result, where the others have none.

    `kept` makes of the arguments what the gradient needs of them besides tensors, which is `ctx.kept` then: sizes,
    layouts and settings.
    """

    def settled(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if kept is not None:
            ctx.kept = kept(hashable(inputs))
        if setup is not None:
            setup(ctx, hashable(inputs), output)

    torch.library.register_autograd(f"escalade::{name}", backward, setup_context=settled, lib=library)
    if name in _operators:
        _operators[name].differentiate(Gradient(setup, backward, kept, first_alone))


def define_in_place(schema: str, run: Function, fake: Function, instead: str = "") -> Registered:
    """An operator that overwrites what its schema says and returns nothing; it has no gradient, and says so, with what
    there is `instead`."""
    name = _define(schema, run)
    torch.library.register_fake(f"escalade::{name}", fake, lib=library)
    packet = getattr(torch.ops.escalade, name)
    places = [
        place
        for place, argument in enumerate(packet.default._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def overwritten(arguments: tuple[Any, ...]) -> Iterator[torch.Tensor]:
        for place in places:
            given = arguments[place] if place < len(arguments) else ()
            yield from (given,) if isinstance(given, torch.Tensor) else given

    def refuse_what_cannot_be_written(*arguments: Any) -> None:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in overwritten(arguments)):
            raise UnsupportedError(
                f"{name} overwrites a tensor that needs a gradient; use {instead}torch.no_grad()"
            )
        if any(tensor.is_neg() for tensor in overwritten(arguments)):
            raise UnsupportedError(
                f"{name} overwrites a tensor that PyTorch negates when it is read, such as the imaginary part of a "
                "conjugate; pass what resolve_neg() returns"
            )
        with torch._C._AutoDispatchBelowAutograd():
            packet(*arguments)

    def count_the_change(*arguments: Any) -> None:
        torch.autograd.graph.increment_version(
            [tensor for tensor in overwritten(arguments) if not tensor.is_inference()]
        )
        with torch._C._AutoDispatchBelowADInplaceOrView():
            packet(*arguments)

    library.impl(name, refuse_what_cannot_be_written, "Autograd")
    library.impl(name, count_the_change, "ADInplaceOrView")
    return Registered(name)


def _define(schema: str, run: Function) -> str:
    library.define(schema)
    name = schema.partition("(")[0]

    @wraps(run)
    def on_cuda(x: torch.Tensor | list[torch.Tensor], *rest: Any) -> Any:
        with torch.cuda.device((x if isinstance(x, torch.Tensor) else x[0]).device):
            return run(x, *rest)

    library.impl(name, run, "CPU")
    library.impl(name, on_cuda, "CUDA")
    return name


def without_launch(run: Function) -> Function:
    """The fake of an operator whose checks and result are the same whether it runs (`launch`) or not."""

    @wraps(run)
    def fake(*arguments: Any) -> Any:
        return run(*arguments, launch=False)

    return fake


def define_autocast(name: str, cast: Function) -> None:
    """What takes the place of an operator's arguments under autocast: `cast` is given the dtype in front of them."""
    packet = getattr(torch.ops.escalade, name)

    def under(device_type: str) -> Function:
        def cast_and_run(*arguments: Any) -> Any:
            settled = cast(torch.get_autocast_dtype(device_type), *arguments)
            with torch.autocast(device_type, enabled=False):
                return packet(*settled)

        return cast_and_run

    library.impl(name, under("cuda"), "AutocastCUDA")
    library.impl(name, under("cpu"), "AutocastCPU")
    if name in _operators:
        _operators[name].cast_under_autocast(cast)


def require_rung(operation: Operation[Any], name: str | None) -> None:
    """A name that no rung has is wrong even where there is nothing to do."""
    if name is not None:
        operation.ladder.rung(name)


def require_alike(x: torch.Tensor, others: dict[str, torch.Tensor | None]) -> None:
    """One device and one dtype; None stands for a tensor that is not there."""
    for name, tensor in others.items():
        if tensor is None:
            continue
        require_same_device(x, name, tensor)
        if tensor.dtype != x.dtype:
            raise UnsupportedError(f"x is {x.dtype} but {name} {tensor.dtype}; convert them to one dtype")


def require_same_device(x: torch.Tensor, name: str, tensor: torch.Tensor) -> None:
    if tensor.device != x.device:
        raise UnsupportedError(f"x is on {x.device} but {name} on {tensor.device}; move them to one device")
