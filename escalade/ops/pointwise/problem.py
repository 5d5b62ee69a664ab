"""A pointwise program over tensors as a problem."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from escalade.errors import UnsupportedError
from escalade.ops.base.checks import match_name, require
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.expressions import Expression
from escalade.ops.shared.pointwise import Operand, check, dense_strides

READ = (*DTYPES, "uint8")
"""What operands may hold. Truth values are bytes of 0 and 1."""
MOST_OPERANDS = 16
MOST_RESULTS = 8
_NAME = re.compile(r"(?P<shape>\d+(x\d+)*)\[(?P<expression>[^\]]+)\](\((?P<operands>[^)]+)\))?")
_OPERAND = re.compile(r"(?P<name>\w+):(?P<strides>\d+(,\d+)*)?(:(?P<dtype>\w+))?")


@dataclass(frozen=True)
class View:
    """How an operand lies in memory: strides along dimensions that are broadcast against the result's, and its dtype;
    empty for the problem's."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str = ""


@dataclass(frozen=True)
class PointwiseProblem:
    """y = expression(operands) for each element of a result whose dimensions lie in memory as they come.

    Make one of views by `of`, which puts dimensions together: an operand of `operands` has a stride for each that is
    left, 0 where it is broadcast.
    """

    shape: tuple[int, ...]
    expression: str
    operands: tuple[Operand, ...]
    dtype: str = "fp32"
    layout: str = "flat"
    batch: int = 1
    """Elements belong to no image; records of all operations have a batch."""

    def __post_init__(self) -> None:
        program = Expression.parse(self.expression)
        object.__setattr__(self, "expression", program.text)
        check("pointwise", math.prod(self.shape), self.batch, self.dtype, self.layout)
        if tuple(operand.name for operand in self.operands) != program.inputs or not program.inputs:
            raise UnsupportedError(
                f"{program.text}: the operands are those that it names, in that order: "
                f"{', '.join(program.inputs) or 'at least one'}"
            )
        if len(self.operands) > MOST_OPERANDS or len(program.results) > MOST_RESULTS:
            raise UnsupportedError(
                f"{len(self.operands)} operands and {len(program.results)} results: pointwise takes up to "
                f"{MOST_OPERANDS} and {MOST_RESULTS}"
            )
        for operand in self.operands:
            require("pointwise", f"{operand.name} of type", operand.dtype, READ)
            if len(operand.strides) != len(self.shape) or not all(
                0 <= stride < 2**31 for stride in operand.strides
            ):
                raise UnsupportedError(
                    f"{operand.name} has strides {operand.strides}: there is one below 2^31 for each of the "
                    f"{len(self.shape)} dimensions"
                )

    @staticmethod
    def of(
        expression: str, shape: Sequence[int], views: Mapping[str, View], dtype: str = "fp32"
    ) -> PointwiseProblem:
        """The problem of a dense result and operands, by name, that are broadcast to it as PyTorch does; with as few
        dimensions as say it all."""
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
        """The problem of a name such as `3136x64[x*scale](scale:0,1)`."""
        form = (
            "pointwise program; the form is 3136x64[x*scale](scale:0,1): the sizes, the expression, and the strides of "
            "operands that are not dense, a semicolon between two, with :uint8 behind those of another type"
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
        """Short and stable; `parse` is its inverse (the dtype stands apart)."""
        dense = dense_strides(self.shape)
        further = []
        for operand in self.operands:
            strides = "" if operand.strides == dense else ",".join(map(str, operand.strides))
            other = "" if operand.dtype == self.dtype else f":{operand.dtype}"
            if strides or other:
                further.append(f"{operand.name}:{strides}{other}")
        sizes = "x".join(map(str, self.shape))
        return f"{sizes}[{self.expression.replace(' ', '')}]" + (f"({';'.join(further)})" if further else "")

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
        """Each function rounds once."""
        return 2.0**-24 * max(1, len(self.program.calls))


def _broadcast(view: View, shape: Sequence[int]) -> tuple[int, ...]:
    """A view's strides along the result's dimensions."""
    missing = len(shape) - len(view.shape)
    fits = missing >= 0 and all(
        own in (1, size) for own, size in zip(view.shape, shape[missing:], strict=True)
    )
    if not fits:
        raise UnsupportedError(f"an operand of sizes {list(view.shape)} has no place in {list(shape)}")
    own = (0 if size == 1 else stride for size, stride in zip(view.shape, view.strides, strict=True))
    return (*(0,) * missing, *own)


def _collapsed(
    shape: Sequence[int], strides: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """Neighbouring dimensions made one wherever every operand passes from one to the other as it passes along it."""
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
