"""ReLU, ReLU6 and their gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from escalade.device.strides import aligned
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, NAMES, STORAGE, dtype_of
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.naming import NUMBER, Codec, Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors, in_float64
from escalade.ops.base.rung import Rung
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_in_place, define_planned
from escalade.ops.expressions import Expression
from escalade.ops.shared import pointwise
from escalade.ops.shared.pointwise import Naive, Operand, Vectorized, check, empty_output, random_inputs

# --- the problem


@dataclass(frozen=True)
class ReluProblem(Named):
    """y = min(max(x, 0), limit) over `elements` elements; without a limit max(x, 0). NaN is preserved.

    With `backward`: dx from `gradient` (dy) and `output` (y): the gradient where y is strictly between the bounds or
    NaN, and 0 elsewhere. The upper bound is the limit rounded to the dtype.
    """

    NAME: ClassVar = NamePattern(
        "rectifier",
        "relu[{limit}]{backward?_backward}_{elements}",
        limit=Codec(NUMBER, float, lambda limit: repr(float(limit)).removesuffix(".0")),
    )

    elements: int
    limit: float | None = None
    """Largest result; 6.0 is ReLU6."""
    dtype: str = "fp32"
    layout: str = "flat"
    batch: int = 1
    """Always 1; records of all operations have a batch."""
    backward: bool = False

    rounding = 2.0**-24

    def __post_init__(self) -> None:
        check("relu", self.elements, self.batch, self.dtype, self.layout)
        if self.limit is not None and not 0 < self.limit < math.inf:
            raise UnsupportedError(f"limit is {self.limit}: it must be positive and finite, or None")

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.elements,)

    @property
    def operands(self) -> tuple[Operand, ...]:
        return tuple(Operand(name, (1,), self.dtype) for name in self.program.inputs)

    @property
    def program(self) -> Expression:
        if not self.backward:
            return Expression.parse("relu(x)" if self.limit is None else f"minimum(relu(x), {self.limit!r})")
        passes = "gradient"
        if self.limit is not None:
            largest = torch.tensor(self.limit, dtype=STORAGE[self.dtype], device="cpu").item()
            passes = f"where(output >= {largest!r}, 0, gradient)"
        return Expression.parse(f"where(output <= 0, 0, {passes})")

    @property
    def flops(self) -> int:
        return self.elements * (1 if self.limit is None else 2)

    @property
    def bytes(self) -> int:
        return (3 if self.backward else 2) * self.elements * ELEMENT_BYTES[self.dtype]


# --- rungs


# Predictions are for 51,380,224 elements in fp16, 206 MB to move: 49 us at 4.24 TB/s. One element per thread has at
# most 2,048 loads of 2 bytes in flight per SM; at 0.7 us each, 132 SMs read 0.77 TB/s: 133 us. In fp32, with twice the
# bytes in flight, the gain should be 1.3. The gradient reads two tensors, so that even a thread with one element has
# two loads in flight: 1.8 in fp16 and 1.1 in fp32.
RUNGS: tuple[Rung[Any], ...] = (
    Naive("naive", "one element per thread", None, None),
    Vectorized("vectorised", "16 bytes per access, several in flight per thread", "naive", 2.6),
)


# --- the reference


def peer(problem: ReluProblem, inputs: Tensors) -> torch.Tensor:
    limit = problem.limit
    if problem.backward:
        gradient, output = inputs["gradient"], inputs["output"]
        if limit is None:
            return torch.ops.aten.threshold_backward(gradient, output, 0)
        return torch.ops.aten.hardtanh_backward(gradient, output, 0.0, limit)
    x = inputs["x"]
    return torch.relu(x) if limit is None else F.hardtanh(x, 0.0, limit)


# --- the operation


class ReluOperation(Operation[ReluProblem]):
    name = "relu"
    problem = ReluProblem
    in_pytorch = Reference(random_inputs, empty_output, in_float64(peer), peer)
    ladder = Ladder("relu", RUNGS)
    problems = (
        ReluProblem(802_816),
        ReluProblem(6_422_528),
        ReluProblem(25_690_112),
        ReluProblem(51_380_224),
        ReluProblem(51_380_224, 6.0),
        ReluProblem(205_520_896),
        ReluProblem(51_380_224, backward=True),
    )
    """ResNet-18: 512 channels 7² at batch 32, 64 channels 56² and 112² at 32, then both at 256; the gradient at 56²."""
    small_problems = (
        ReluProblem(1),
        ReluProblem(7, 6.0),
        ReluProblem(1000),
        ReluProblem(8 * 1024),
        ReluProblem(9001, 6.0),
        ReluProblem(4099, 0.3),
        ReluProblem(9001, backward=True),
        ReluProblem(1000, 6.0, backward=True),
    )
    dtypes = DTYPES
    layouts = pointwise.LAYOUTS

    def preferred(self, problem: ReluProblem) -> tuple[str, ...]:
        return ("vectorised",)


RELU = ReluOperation()


# --- the PyTorch operator


def relu(x: torch.Tensor, limit: float | None = None, *, rung: str | None = None) -> torch.Tensor:
    """max(x, 0), at most `limit` if given (6.0 is ReLU6); any shape, the result in x's layout."""
    return OPERATOR(x, limit, rung)


def relu_(x: torch.Tensor, limit: float | None = None, *, rung: str | None = None) -> torch.Tensor:
    """`relu` in place: overwrites and returns x, which must not require grad."""
    _IN_PLACE(x, limit, rung)
    return x


def _problem(x: torch.Tensor, limit: float | None) -> ReluProblem:
    return ReluProblem(x.numel(), limit, dtype_of("relu", x))


def _plan(x: torch.Tensor, limit: float | None = None, rung: str | None = None) -> CallPlan:
    return pointwise.plan(RELU, lambda: _problem(x, limit), x, "x")


def _fake_in_place(x: torch.Tensor, *_: object) -> None:
    dtype_of("relu", x)


def _run_in_place(x: torch.Tensor, limit: float | None = None, rung: str | None = None) -> None:
    if any(stride == 0 and size > 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
        raise UnsupportedError("elements of x share memory; relu_ needs a tensor without overlaps")
    dense = x.stride() == torch.empty_like(x, device="meta").stride()
    y = aligned(x) if dense else torch.empty_like(x).copy_(x)
    pointwise.run(RELU, _problem(x, limit), {"x": y}, y, rung)
    if y.data_ptr() != x.data_ptr():
        x.copy_(y)


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(output)


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    (y,) = ctx.saved_tensors
    return _GRADIENT(gradient, y, ctx.kept), None, None


def _limit(inputs):  # type: ignore[no-untyped-def]
    return inputs[1]


# --- gradient


def _plan_gradient(gradient: torch.Tensor, output: torch.Tensor, limit: float | None = None) -> CallPlan:
    """Compute the gradient from the output alone. It passes at NaN on every device, unlike PyTorch's hardtanh."""
    return pointwise.plan(
        RELU,
        lambda: ReluProblem(output.numel(), limit, NAMES[output.dtype], backward=True),
        output,
        "gradient",
        "output",
    )


def _setup_gradient(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, y, ctx.limit = inputs
    ctx.save_for_backward(y)


def _backward_gradient(ctx, gradient):  # type: ignore[no-untyped-def]
    """The result is linear in the gradient and piecewise constant in the output."""
    (y,) = ctx.saved_tensors
    return _GRADIENT(gradient, y, ctx.limit), None, None


_GRADIENT = define_planned(
    "relu_backward",
    _plan_gradient,
    "gradient: ..., output: ...",
    setup=_setup_gradient,
    backward=_backward_gradient,
)
OPERATOR = define_planned("relu", _plan, "x: ...", setup=_setup, backward=_backward, kept=_limit)
_IN_PLACE = define_in_place(
    "relu_(Tensor(a!) x, float? limit=None, str? rung=None) -> ()",
    _run_in_place,
    _fake_in_place,
    instead="relu, or ",
)
