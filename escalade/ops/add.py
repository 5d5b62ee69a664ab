"""Sum of two tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, NAMES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors, in_float64
from escalade.ops.base.rung import Rung
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_planned
from escalade.ops.expressions import Expression
from escalade.ops.shared import pointwise
from escalade.ops.shared.pointwise import Naive, Operand, Vectorized, check, empty_output, random_inputs

# --- the problem


@dataclass(frozen=True)
class AddProblem(Named):
    """y = x + residual over `elements` elements, then max(y, 0) if `relu`. y may alias x or the residual."""

    NAME: ClassVar = NamePattern("sum", "add{relu?_relu}_{elements}")

    elements: int
    relu: bool = False
    dtype: str = "fp32"
    layout: str = "flat"
    batch: int = 1
    """Always 1; records of all operations have a batch."""

    rounding = 2.0**-24

    def __post_init__(self) -> None:
        check("add", self.elements, self.batch, self.dtype, self.layout)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.elements,)

    @property
    def operands(self) -> tuple[Operand, ...]:
        return tuple(Operand(name, (1,), self.dtype) for name in self.program.inputs)

    @property
    def program(self) -> Expression:
        return Expression.parse("relu(x + residual)" if self.relu else "x + residual")

    @property
    def flops(self) -> int:
        return self.elements * (2 if self.relu else 1)

    @property
    def bytes(self) -> int:
        return 3 * self.elements * ELEMENT_BYTES[self.dtype]


# --- rungs


# Predictions are for 51,380,224 elements in fp16, 308 MB to move: 73 us at 4.24 TB/s. One element per thread has at
# most 4,096 loads of 2 bytes in flight per SM; at 0.7 us each, 132 SMs read 1.5 TB/s: 133 us.
RUNGS: tuple[Rung[Any], ...] = (
    Naive("naive", "one element per thread", None, None),
    Vectorized("vectorised", "16 bytes per access, several in flight per thread", "naive", 1.8),
)


# --- the reference


def peer(problem: AddProblem, inputs: Tensors) -> torch.Tensor:
    y = inputs["x"] + inputs["residual"]
    return y.relu_() if problem.relu else y


# --- the operation


class AddOperation(Operation[AddProblem]):
    name = "add"
    problem = AddProblem
    in_pytorch = Reference(random_inputs, empty_output, in_float64(peer), peer)
    ladder = Ladder("add", RUNGS)
    problems = (
        AddProblem(802_816, relu=True),
        AddProblem(6_422_528, relu=True),
        AddProblem(25_690_112, relu=True),
        AddProblem(51_380_224),
        AddProblem(51_380_224, relu=True),
        AddProblem(205_520_896, relu=True),
    )
    """ResNet-18: 512 channels 7² at batch 32, 64 channels 56² and 112² at 32, then both at 256."""
    small_problems = (
        AddProblem(1),
        AddProblem(7, relu=True),
        AddProblem(1000),
        AddProblem(8 * 1024, relu=True),
        AddProblem(9001, relu=True),
    )
    dtypes = DTYPES
    layouts = pointwise.LAYOUTS

    def preferred(self, problem: AddProblem) -> tuple[str, ...]:
        return ("vectorised",)


ADD = AddOperation()


# --- the PyTorch operator


def add(
    x: torch.Tensor, residual: torch.Tensor, *, relu: bool = False, rung: str | None = None
) -> torch.Tensor:
    """x + residual, then max(…, 0) if `relu`; tensors of one shape, the result in x's layout."""
    return OPERATOR(x, residual, relu, rung)


def _plan(x: torch.Tensor, residual: torch.Tensor, relu: bool = False, rung: str | None = None) -> CallPlan:
    return pointwise.plan(ADD, lambda: AddProblem(x.numel(), relu, NAMES[x.dtype]), x, "x", "residual")


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(output if inputs[2] else None)


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    (y,) = ctx.saved_tensors
    if y is not None:
        gradient = torch.ops.aten.threshold_backward(gradient, y, 0)
    return gradient, gradient, None, None


OPERATOR = define_planned("add", _plan, "x: ..., residual: ...", setup=_setup, backward=_backward)
