"""Any element-wise function."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from escalade.device.strides import aligned
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import match_name, require
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, STORAGE, dtype_of
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation, Reference, Tensors
from escalade.ops.base.rung import Rung
from escalade.ops.calling.executables import prepare_rung
from escalade.ops.calling.library import define, require_rung, require_same_device
from escalade.ops.expressions import Expression
from escalade.ops.shared import pointwise as shared_pointwise
from escalade.ops.shared.pointwise import (
    Naive,
    Operand,
    Vectorized,
    check,
    dense_strides,
    empty_output,
    random_inputs,
    result_names,
)

# --- the problem


READ = (*DTYPES, "uint8")
"""Dtypes of operands. Booleans are bytes of 0 and 1."""
MOST_OPERANDS = 16
MOST_RESULTS = 8
_NAME = re.compile(r"(?P<shape>\d+(x\d+)*)\[(?P<expression>[^\]]+)\](\((?P<operands>[^)]+)\))?")
_OPERAND = re.compile(r"(?P<name>\w+):(?P<strides>\d+(,\d+)*)?(:(?P<dtype>\w+))?")


@dataclass(frozen=True)
class View:
    """Memory layout of an operand: strides of dimensions that broadcast against the result's, and its dtype; empty for
    the problem's."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str = ""


@dataclass(frozen=True)
class PointwiseProblem:
    """y = expression(operands) for each element of a dense result.

    Build one from views with `of`, which merges dimensions. Each operand has one stride per remaining dimension, 0
    where it is broadcast.
    """

    shape: tuple[int, ...]
    expression: str
    operands: tuple[Operand, ...]
    dtype: str = "fp32"
    layout: str = "flat"
    batch: int = 1
    """Always 1; records of all operations have a batch."""

    def __post_init__(self) -> None:
        program = Expression.parse(self.expression)
        object.__setattr__(self, "expression", program.text)
        check("pointwise", math.prod(self.shape), self.batch, self.dtype, self.layout)
        if tuple(operand.name for operand in self.operands) != program.inputs or not program.inputs:
            raise UnsupportedError(
                f"{program.text}: operands must be its inputs, in this order: "
                f"{', '.join(program.inputs) or 'at least one'}"
            )
        if len(self.operands) > MOST_OPERANDS or len(program.results) > MOST_RESULTS:
            raise UnsupportedError(
                f"{len(self.operands)} operands and {len(program.results)} results: pointwise supports up to "
                f"{MOST_OPERANDS} and {MOST_RESULTS}"
            )
        for operand in self.operands:
            require("pointwise", f"{operand.name} of type", operand.dtype, READ)
            if len(operand.strides) != len(self.shape) or not all(
                0 <= stride < 2**31 for stride in operand.strides
            ):
                raise UnsupportedError(
                    f"{operand.name} has strides {operand.strides}: each of the {len(self.shape)} dimensions needs one "
                    "below 2^31"
                )

    @staticmethod
    def of(
        expression: str, shape: Sequence[int], views: Mapping[str, View], dtype: str = "fp32"
    ) -> PointwiseProblem:
        """Return the problem of a dense result and of operands that broadcast to it, with as few dimensions as
        possible."""
        program = Expression.parse(expression)
        names = program.inputs
        strides = [_broadcast(views[name], shape) for name in names]
        sizes, together = _collapsed(shape, strides)
        operands = (
            Operand(name, found, views[name].dtype or dtype)
            for name, found in zip(names, together, strict=True)
        )
        return PointwiseProblem(sizes, program.text, tuple(operands), dtype)

    @staticmethod
    def parse(name: str, dtype: str = "fp32") -> PointwiseProblem:
        """Parse a name such as `3136x64[x*scale](scale:0,1)`."""
        form = (
            "pointwise program; the form is 3136x64[x*scale](scale:0,1): the sizes, the expression, and the strides of "
            "operands that are not dense, separated by semicolons, with :uint8 after those of another type"
        )
        found = match_name(_NAME, name, form)
        shape = tuple(int(size) for size in found["shape"].split("x"))
        program = Expression.parse(found["expression"])
        operands = {one: Operand(one, dense_strides(shape), dtype) for one in program.inputs}
        for text in (found["operands"] or "").split(";") if found["operands"] else ():
            given = match_name(_OPERAND, text, form)
            strides = (
                tuple(map(int, given["strides"].split(","))) if given["strides"] else dense_strides(shape)
            )
            operands[given["name"]] = Operand(given["name"], strides, given["dtype"] or dtype)
        return PointwiseProblem(shape, program.text, tuple(operands.values()), dtype)

    @property
    def name(self) -> str:
        """Short and stable; `parse` is its inverse (the dtype is not part of it)."""
        dense = dense_strides(self.shape)
        listed = []
        for operand in self.operands:
            strides = "" if operand.strides == dense else ",".join(map(str, operand.strides))
            other = "" if operand.dtype == self.dtype else f":{operand.dtype}"
            if strides or other:
                listed.append(f"{operand.name}:{strides}{other}")
        sizes = "x".join(map(str, self.shape))
        return f"{sizes}[{self.expression.replace(' ', '')}]" + (f"({';'.join(listed)})" if listed else "")

    @property
    def program(self) -> Expression:
        return Expression.parse(self.expression)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def flops(self) -> int:
        return self.elements * len(self.program.calls)

    @property
    def bytes(self) -> int:
        read = 0
        for operand in self.operands:
            own = (size for size, stride in zip(self.shape, operand.strides, strict=True) if stride)
            read += math.prod(own) * ELEMENT_BYTES[operand.dtype]
        return read + len(self.program.results) * self.elements * ELEMENT_BYTES[self.dtype]

    @property
    def rounding(self) -> float:
        return 2.0**-24 * max(1, len(self.program.calls))  # one rounding per function


def _broadcast(view: View, shape: Sequence[int]) -> tuple[int, ...]:
    """Return a view's strides along the result's dimensions."""
    missing = len(shape) - len(view.shape)
    fits = missing >= 0 and all(
        own in (1, size) for own, size in zip(view.shape, shape[missing:], strict=True)
    )
    if not fits:
        raise UnsupportedError(f"an operand of shape {list(view.shape)} does not broadcast to {list(shape)}")
    own = (0 if size == 1 else stride for size, stride in zip(view.shape, view.strides, strict=True))
    return (*(0,) * missing, *own)


def _collapsed(
    shape: Sequence[int], strides: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Merge adjacent dimensions wherever all operands are contiguous across them."""
    sizes: list[int] = []
    kept: list[list[int]] = [[] for _ in strides]
    for axis, size in enumerate(shape):
        if size == 1:
            continue
        steps = [own[axis] for own in strides]
        if sizes and all(own[-1] == step * size for own, step in zip(kept, steps, strict=True)):
            sizes[-1] *= size
            for own, step in zip(kept, steps, strict=True):
                own[-1] = step
        else:
            sizes.append(size)
            for own, step in zip(kept, steps, strict=True):
                own.append(step)
    if not sizes:
        return (1,), [(1,) for _ in strides]
    return tuple(sizes), [tuple(own) for own in kept]


# --- rungs


# Predictions are for silu of 51,380,224 elements in fp16, 206 MB to move: 49 us at 4.24 TB/s. One element per thread
# has at most 2,048 loads of 2 bytes in flight per SM; at 0.7 us each, 132 SMs read 0.77 TB/s: 133 us. In fp32, with
# twice the bytes in flight, the gain should be 1.3.
RUNGS: tuple[Rung[Any], ...] = (
    Naive("naive", "one element per thread, located by division", None, None),
    Vectorized("vectorised", "16 bytes per access, several in flight per thread", "naive", 2.6),
)


# --- the reference


def exact(problem: PointwiseProblem, inputs: Tensors) -> torch.Tensor:
    return results(problem, inputs, torch.float64)[0]


def peer(problem: PointwiseProblem, inputs: Tensors) -> torch.Tensor:
    return results(problem, inputs, STORAGE[problem.dtype])[0]


def results(problem: PointwiseProblem, inputs: Tensors, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return all results in a dtype, in memory order."""
    seen = {
        operand.name: in_memory(inputs[operand.name]).as_strided(problem.shape, operand.strides).to(dtype)
        for operand in problem.operands
    }
    return tuple(result.expand(problem.shape) for result in problem.program.evaluate(seen))


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's elements in memory order, without gaps."""
    if tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        tensor = tensor.permute(0, 2, 3, 1)
    return tensor.contiguous().view(-1)


# --- the operation


class PointwiseOperation(Operation[PointwiseProblem]):
    name = "pointwise"
    problem = PointwiseProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("pointwise", RUNGS)
    problems = tuple(
        map(
            PointwiseProblem.parse,
            (
                "802816[silu(x)]",
                "51380224[silu(x)]",
                "51380224[hardswish(x)]",
                "51380224[x+0.1*a]",
                "802816x64[x*a+b](a:0,1;b:0,1)",
                "256x3136x64[x*sigmoid(a)](a:64,0,1)",
                "16384x3136[relu(x*a)](a:1,0)",
                "205520896[gelu(x)]",
            ),
        )
    )
    """Activations of ResNet-50's sizes at batch 256, a scaled residual, factors per channel, per image and per
    plane."""
    small_problems = tuple(
        map(
            PointwiseProblem.parse,
            (
                "1[silu(x)]",
                "9001[x*sigmoid(x)]",
                "4099[where(x>a,x,0.1*a)]",
                "37x64[x*a+b](a:0,1;b:0,1:fp32)",
                "3x49x16[x*sigmoid(a)](a:16,0,1)",
                "24x49[relu(x)*a](a:1,0)",
                "5x7x3[x+a](a:0,3,1)",
                "2x24x16[x+a](a:384,1,24)",
                "6x10x8[x+where(a,b,1)](a:80,8,1:uint8;b:0,0,0)",
                "33x40[t=x+a;t,t*t](a:40,1)",
            ),
        )
    )
    dtypes = DTYPES
    layouts = shared_pointwise.LAYOUTS
    order = ("vectorised", "naive")

    def extra_outputs(self, problem: PointwiseProblem, device: torch.device) -> dict[str, torch.Tensor]:
        names = shared_pointwise.result_names(problem.program)[1:]
        return {name: empty_output(problem, device) for name in names}

    def extra_references(self, problem: PointwiseProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        names = shared_pointwise.result_names(problem.program)
        every = zip(names, results(problem, inputs, torch.float64), strict=True)
        return dict(list(every)[1:])


POINTWISE = PointwiseOperation()


# --- the PyTorch operator


_BYTES = (torch.uint8, torch.bool)


def pointwise(
    expression: str, *, rung: str | None = None, **tensors: torch.Tensor
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Evaluate an expression such as `x * sigmoid(gate)` on the tensors it names, with broadcasting.

    They are float32, float16 or bfloat16, all of one dtype, or uint8 or bool. Several results are a tuple.
    """
    names = Expression.parse(expression).inputs
    if set(names) != set(tensors) or not names:
        raise UnsupportedError(
            f"{expression!r} uses {', '.join(names) or 'nothing'}, but {', '.join(tensors) or 'nothing'} is given; "
            "pass exactly the tensors that the expression names, at least one"
        )
    first, *others = (tensors[name] for name in names)
    results = OPERATOR(first, others, expression, rung)
    return results[0] if len(results) == 1 else tuple(results)


def _given(x: torch.Tensor, others: list[torch.Tensor], expression: str) -> dict[str, torch.Tensor]:
    return dict(zip(Expression.parse(expression).inputs, (x, *others), strict=True))


def _dtype(tensors: dict[str, torch.Tensor]) -> str:
    """Return the one floating dtype of the tensors."""
    x = next(iter(tensors.values()))
    floating = {name: tensor for name, tensor in tensors.items() if tensor.dtype not in _BYTES}
    types = {tensor.dtype for tensor in floating.values()}
    if len(types) != 1:
        given = ", ".join(f"{name} is {tensor.dtype}" for name, tensor in tensors.items())
        raise UnsupportedError(f"{given}; pointwise needs floating-point tensors of one dtype, at least one")
    for name, tensor in tensors.items():
        require_same_device(x, name, tensor)
    return dtype_of("pointwise", next(iter(floating.values())))


def _empty_results(tensors: dict[str, torch.Tensor], count: int) -> list[torch.Tensor]:
    """Return empty results with the memory order of the first tensor that is not broadcast."""
    try:
        shape = torch.broadcast_shapes(*(tensor.shape for tensor in tensors.values()))
    except RuntimeError as error:
        sizes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise UnsupportedError(f"shapes of {sizes} cannot be broadcast against each other") from error
    like = next(iter(tensor for tensor in tensors.values() if tensor.dtype not in _BYTES))
    pattern = next((tensor for tensor in tensors.values() if tensor.shape == shape), None)
    made = like.new_empty(shape) if pattern is None else torch.empty_like(pattern, dtype=like.dtype)
    return [made, *(torch.empty_like(made) for _ in range(count - 1))]


def _run(
    x: torch.Tensor, others: list[torch.Tensor], expression: str, rung: str | None
) -> list[torch.Tensor]:
    tensors, program = _given(x, others, expression), Expression.parse(expression)
    dtype = _dtype(tensors)
    results = _empty_results(tensors, len(program.results))
    made = dict(zip(result_names(program), results, strict=True))
    renamed = _distinct_names(made, tensors)
    program, tensors = program.rename(renamed), {renamed[name]: tensor for name, tensor in tensors.items()}
    y = results[0]
    if y.numel() == 0:
        require_rung(POINTWISE, rung)
        return results
    order = sorted(range(y.dim()), key=lambda axis: (-y.stride()[axis], axis))
    seen = {
        name: aligned(_in_range(tensor)).expand(y.shape).permute(order) for name, tensor in tensors.items()
    }
    views = {
        name: View(tuple(tensor.shape), _steps(tensor), "uint8" if tensor.dtype in _BYTES else dtype)
        for name, tensor in seen.items()
    }
    problem = PointwiseProblem.of(program.text, [y.shape[axis] for axis in order], views, dtype)
    prepare_rung(POINTWISE, problem, y.device, rung).run({**seen, **made})
    return results


def _distinct_names(made: Iterable[str], names: Iterable[str]) -> dict[str, str]:
    """Return a name for each input that no result has, since the kernel's buffers are bound by name."""
    taken, found = {*made, *names}, {}
    for name in names:
        found[name] = name
        while found[name] in made:
            found[name] = next(new for n in itertools.count() if (new := f"{name}_{n}") not in taken)
        taken.add(found[name])
    return found


def _in_range(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a dense copy if its strides span more than 2^31 elements."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor if max(math.prod(tensor.shape), reach) < 2**31 else tensor.contiguous()


def _steps(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(
        0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _fake(
    x: torch.Tensor, others: list[torch.Tensor], expression: str, rung: str | None
) -> list[torch.Tensor]:
    tensors = _given(x, others, expression)
    _dtype(tensors)
    return _empty_results(tensors, len(Expression.parse(expression).results))


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    x, others, ctx.expression, _ = inputs
    ctx.save_for_backward(x, *others)


def _backward(ctx, gradients):  # type: ignore[no-untyped-def]
    """Differentiate the expression with PyTorch, function by function."""
    wanted = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in ctx.saved_tensors]
    floating = [tensor for tensor in wanted if tensor.requires_grad]
    with torch.enable_grad():
        given = _given(wanted[0], [tensor.to(floating[0].dtype) for tensor in wanted[1:]], ctx.expression)
        results = Expression.parse(ctx.expression).evaluate(given)
        pairs = [
            (result, gradient.expand(result.shape))
            for result, gradient in zip(results, gradients, strict=True)
            if result.requires_grad
        ]
        found = torch.autograd.grad(
            [result for result, _ in pairs], floating, [gradient for _, gradient in pairs], allow_unused=True
        )
    by_tensor = dict(zip(map(id, floating), found, strict=True))
    first, *rest = (by_tensor.get(id(tensor)) for tensor in wanted)
    return first, rest, None, None


OPERATOR = define(
    "pointwise(Tensor x, Tensor[] others, str expression, str? rung) -> Tensor[]",
    _run, _fake, setup=_setup, backward=_backward,
)  # fmt: skip
