"""Registration with `torch.library`: one function for CPU (the twin) and CUDA, a fake, a gradient, autocast."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import NAMES
from escalade.ops.base.operation import Operation
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.operator import Operator, hashable
from escalade.ops.calling.recorded import Gradient
from escalade.ops.calling.tensors import TakenTensors
from escalade.ops.calling.types import ArgumentTypes
from escalade.terminal_text import counted

library = torch.library.Library("escalade", "FRAGMENT")
Function = Callable[..., Any]
Pair = tuple[int, int]
"""`int[2]` in a schema; `SymPair` is `SymInt[2]`, for sizes that may be symbolic."""
SymPair = tuple[int, int]
Sides = Sequence[int]
Factors = tuple[float, float]
_SCHEMA_TYPES = {
    "torch.Tensor": "Tensor",
    "Sequence[torch.Tensor]": "Tensor[]",
    "Pair": "int[2]",
    "SymPair": "SymInt[2]",
    "Sides": "int[4]",
    "Factors": "float[2]",
}
_PAIRS = ("Pair", "SymPair", "Factors")
_operators: dict[str, Operator] = {}


class RegisteredOperator:
    """An operator called through the dispatcher, with all arguments positional."""

    def __init__(self, name: str) -> None:
        self._packet = getattr(torch.ops.escalade, name)
        self._types = ArgumentTypes(self._packet)

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
) -> RegisteredOperator:
    """Define an operator that mutates none of its arguments and runs on the device of the first."""
    name = _define(schema, run)
    torch.library.register_fake(f"escalade::{name}", fake, lib=library)
    if backward is not None:
        define_gradient(name, setup, backward)
    return RegisteredOperator(name)


def schema_of(name: str, function: Function, returns: str) -> str:
    """Return the schema of an operator with the parameters of a function, whose annotations are strings."""

    def spelled(parameter: inspect.Parameter) -> str:
        kind = parameter.annotation.removesuffix(" | None")
        optional = "?" if kind != parameter.annotation else ""
        default: Any = parameter.default
        value = json.dumps(default) if isinstance(default, str | tuple) else repr(default)
        text = "" if default is parameter.empty else f"={value}"
        return f"{_SCHEMA_TYPES.get(kind, kind)}{optional} {parameter.name}{text}"

    return f"{name}({', '.join(map(spelled, inspect.signature(function).parameters.values()))}) -> {returns}"


def define_planned(
    name: str,
    plan: Function,
    takes: str,
    *,
    returns: str = "Tensor",
    setup: Function | None = None,
    backward: Function | None = None,
    kept: Function | None = None,
    autocast: bool = False,
) -> Operator:
    """Define an operator that mutates none of its arguments, and return its fast callable.

    `plan` takes all arguments and returns the `CallPlan` of tensors and settings of this kind. The operator's schema
    has its parameters, and its fake the plan's results. Buffers have the names of the arguments. `takes` describes the
    tensors, which are checked first: see `escalade.ops.calling.tensors`. An argument `rung` names the rung to run.
    Under `autocast` tensors are cast as those of PyTorch's own products; `tf32` then applies if they become float32.
    """
    taken, signature = TakenTensors(name, takes), inspect.signature(plan)
    pairs = [one.name for one in signature.parameters.values() if one.annotation in _PAIRS]

    def checked(*arguments: Any) -> CallPlan:
        given = signature.bind(*arguments)
        given.apply_defaults()
        taken.check(given.arguments)
        for each in pairs:
            values = given.arguments[each]
            if len(values) not in (1, 2):
                raise UnsupportedError(
                    f"{each} has {counted(len(values), 'number')}; {name} takes one, or two"
                )
            given.arguments[each] = (values[0], values[-1])
        found: CallPlan = plan(*given.args)
        return found

    def fake(*arguments: Any) -> Any:
        return checked(*arguments).fake()

    def run(*arguments: Any) -> Any:
        return _operators[name].run(*arguments)

    def cast(dtype: torch.dtype, *arguments: Any) -> tuple[Any, ...]:
        given = signature.bind(*arguments)
        given.apply_defaults()
        changed = {key: _cast(value, dtype) for key, value in given.arguments.items()}
        if "tf32" in changed:
            changed["tf32"] = changed["tf32"] and dtype == torch.float32
        return tuple(changed.values())

    _define(schema_of(name, plan, returns), run)
    _operators[name] = Operator(name, checked)
    if autocast:
        _define_autocast(name, cast)
    torch.library.register_fake(f"escalade::{name}", fake, lib=library)
    if backward is not None:
        define_gradient(name, setup, backward, kept=kept)
    return _operators[name]


def operator(name: str) -> Operator:
    """Return an operator by name, where an import would be circular."""
    return _operators[name]


def define_gradient(
    name: str,
    setup: Function | None,
    backward: Function,
    *,
    kept: Function | None = None,
    first_alone: bool = False,
) -> None:
    """Define the gradient of an operator; with `first_alone` only the first result is differentiable.

    `kept` maps the arguments to what the gradient needs besides tensors (sizes, layouts, settings), as `ctx.kept`.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if kept is not None:
            ctx.kept = kept(hashable(inputs))
        if setup is not None:
            setup(ctx, hashable(inputs), output)

    torch.library.register_autograd(f"escalade::{name}", backward, setup_context=setup_context, lib=library)
    if name in _operators:
        _operators[name].differentiate(Gradient(setup, backward, kept, first_alone))


def define_in_place(schema: str, run: Function, fake: Function, instead: str = "") -> RegisteredOperator:
    """Define an operator that overwrites arguments and returns nothing. It has no gradient; its error suggests
    `instead`."""
    name = _define(schema, run)
    torch.library.register_fake(f"escalade::{name}", fake, lib=library)
    packet = getattr(torch.ops.escalade, name)
    written = [
        position
        for position, argument in enumerate(packet.default._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]

    def overwritten(arguments: tuple[Any, ...]) -> Iterator[torch.Tensor]:
        for position in written:
            given = arguments[position] if position < len(arguments) else ()
            yield from (given,) if isinstance(given, torch.Tensor) else given

    def reject_unwritable(*arguments: Any) -> None:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in overwritten(arguments)):
            raise UnsupportedError(
                f"{name} overwrites a tensor that requires grad; use {instead}torch.no_grad()"
            )
        if any(tensor.is_neg() for tensor in overwritten(arguments)):
            raise UnsupportedError(
                f"{name} overwrites a tensor with the negative bit set, such as the imaginary part of a conjugate; "
                "pass the result of resolve_neg()"
            )
        with torch._C._AutoDispatchBelowAutograd():
            packet(*arguments)

    def bump_versions(*arguments: Any) -> None:
        torch.autograd.graph.increment_version(
            [tensor for tensor in overwritten(arguments) if not tensor.is_inference()]
        )
        with torch._C._AutoDispatchBelowADInplaceOrView():
            packet(*arguments)

    library.impl(name, reject_unwritable, "Autograd")
    library.impl(name, bump_versions, "ADInplaceOrView")
    return RegisteredOperator(name)


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


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Cast tensors that kernels compute with; dtypes without kernels are left for the checks to report."""
    if isinstance(value, list):
        return [_cast(one, dtype) for one in value]
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype in NAMES else value


def _define_autocast(name: str, cast: Function) -> None:
    """Define an operator under autocast: `cast` takes the dtype and the arguments, and returns the new arguments."""
    packet = getattr(torch.ops.escalade, name)

    def under(device_type: str) -> Function:
        def cast_and_run(*arguments: Any) -> Any:
            arguments = cast(torch.get_autocast_dtype(device_type), *arguments)
            with torch.autocast(device_type, enabled=False):
                return packet(*arguments)

        return cast_and_run

    library.impl(name, under("cuda"), "AutocastCUDA")
    library.impl(name, under("cpu"), "AutocastCPU")
    if name in _operators:
        _operators[name].cast_under_autocast(cast)


def require_rung(operation: Operation[Any], name: str | None) -> None:
    """Raise for an unknown rung, even where there is nothing to compute."""
    if name is not None:
        operation.ladder.rung(name)


def require_alike(x: torch.Tensor, others: dict[str, torch.Tensor | None]) -> None:
    """Require one device and one dtype; None is an absent tensor."""
    for name, tensor in others.items():
        if tensor is None:
            continue
        require_same_device(x, name, tensor)
        if tensor.dtype != x.dtype:
            raise UnsupportedError(f"x is {x.dtype} but {name} is {tensor.dtype}; convert them to one dtype")


def require_same_device(x: torch.Tensor, name: str, tensor: torch.Tensor) -> None:
    if tensor.device != x.device:
        raise UnsupportedError(
            f"x is on {x.device} but {name} is on {tensor.device}; move them to one device"
        )
