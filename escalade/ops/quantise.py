"""Quantization to one byte: FP8 or INT8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from escalade.device.architecture import WITH_FP8
from escalade.device.program import Program
from escalade.device.recipe import Buffer, Int64, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import (
    DTYPES,
    E4M3,
    ELEMENT_BYTES,
    NAMES,
    QUANTIZED,
    STORAGE,
    VECTOR_BYTES,
    stored_as,
)
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import launch
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors
from escalade.ops.base.rung import C, Rung, ThreadsConfig, first_that
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_planned
from escalade.ops.shared import pointwise
from escalade.ops.shared.pointwise import PacksConfig, check

# --- the problem


@dataclass(frozen=True)
class QuantiseProblem(Named):
    """y = x * factor in the dtype `output`, over `elements` elements: to nearest (ties to even), saturating.

    In fp8 NaN is preserved; in int8 it becomes -128.
    """

    NAME: ClassVar = NamePattern("quantization", "quantise_{elements}[_{output:fp8|int8}]")

    elements: int
    dtype: str = "fp32"
    """Dtype of x."""
    layout: str = "flat"
    batch: int = 1
    """Always 1; records of all operations have a batch."""
    output: str = "fp8"
    """Dtype of y: fp8 or int8."""

    rounding = 2.0**-24

    def __post_init__(self) -> None:
        require("quantise", "output", self.output, QUANTIZED)
        check("quantise", self.elements, self.batch, self.dtype, self.layout)

    @property
    def flops(self) -> int:
        return self.elements

    @property
    def bytes(self) -> int:
        return self.elements * (ELEMENT_BYTES[self.dtype] + 1) + 4


# --- rungs


@dataclass(frozen=True)
class _Quantizer(Rung[QuantiseProblem, C]):
    def refusal(self, problem: QuantiseProblem) -> str | None:
        here = self.card.architecture
        if problem.output == "fp8" and here is not None and here not in WITH_FP8:
            return f"{self.name} converts to fp8 on {', '.join(WITH_FP8)}; this GPU is {here}"
        return super().refusal(problem)


@dataclass(frozen=True)
class Naive(_Quantizer[ThreadsConfig]):
    def configs(self, problem: QuantiseProblem) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 512, 128))

    def recipe(self, problem: QuantiseProblem, config: ThreadsConfig) -> Recipe:
        program = Program.of("quantise/naive.cu", problem=problem)
        return _launch(problem, program, blocks(problem.elements, config.threads), config.threads)


@dataclass(frozen=True)
class Vectorized(_Quantizer[PacksConfig]):
    def configs(self, problem: QuantiseProblem) -> tuple[PacksConfig, ...]:
        """Default to the most packs per thread that leave enough CTAs."""
        every = [PacksConfig(threads, packs) for threads in (256, 512, 128) for packs in (4, 2, 1, 8)]
        busy = self.card.busy_blocks
        return first_that(lambda one: _vector_blocks(problem, one) >= busy, every, PacksConfig(packs=1))

    def recipe(self, problem: QuantiseProblem, config: PacksConfig) -> Recipe:
        program = Program.of("quantise/vectorised.cu", problem=problem, config=config)
        return _launch(problem, program, _vector_blocks(problem, config), config.threads)


def _vector_blocks(problem: QuantiseProblem, config: PacksConfig) -> int:
    vector = VECTOR_BYTES // ELEMENT_BYTES[problem.dtype]
    return blocks(problem.elements // vector, config.threads * config.packs)


def _launch(problem: QuantiseProblem, program: Program, grid: int, threads: int) -> Recipe:
    arguments = (Buffer("x"), Buffer("factor"), Buffer("y"), Int64(problem.elements))
    return launch(program, grid, threads, *arguments)


# Predictions are for 51,380,224 elements in fp16, 154 MB to move: 36 us at 4.24 TB/s. One element per thread has at
# most 2,048 loads of 2 bytes in flight per SM; at 0.7 us each, 132 SMs read 0.77 TB/s: 133 us.
RUNGS: tuple[Rung[QuantiseProblem], ...] = (
    Naive("naive", "one element per thread", None, None),
    Vectorized("vectorised", "16-byte loads, several in flight per thread, converted in pairs", "naive", 3.5),
)


# --- the reference


def random_inputs(problem: QuantiseProblem, draw: Draw) -> dict[str, torch.Tensor]:
    x = draw.stored(problem, problem.elements)
    return {"x": x, "factor": torch.tensor([37.5], device=draw.device)}


def empty_output(problem: QuantiseProblem, device: torch.device) -> torch.Tensor:
    return torch.empty(problem.elements, dtype=STORAGE[problem.output], device=device)


def exact(problem: QuantiseProblem, inputs: Tensors) -> torch.Tensor:
    """The values in float64 before rounding: the peer has the rounding error too."""
    return inputs["x"].double() * inputs["factor"].double()


def peer(problem: QuantiseProblem, inputs: Tensors) -> torch.Tensor:
    return stored_as(inputs["x"].float() * inputs["factor"], STORAGE[problem.output])


# --- the operation


class QuantiseOperation(Operation[QuantiseProblem]):
    name = "quantise"
    problem = QuantiseProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("quantise", RUNGS)
    problems = (
        QuantiseProblem(200_704),
        QuantiseProblem(6_422_528),
        QuantiseProblem(51_380_224),
    )
    """The output of ResNet-18's stem, 64 channels 56², at batch 1, 32 and 256."""
    small_problems = (
        *map(QuantiseProblem, (1, 1003, 8192, 9001)),
        QuantiseProblem(9001, output="int8"),
    )
    dtypes = DTYPES
    layouts = pointwise.LAYOUTS

    def preferred(self, problem: QuantiseProblem) -> tuple[str, ...]:
        return ("vectorised",)


QUANTISE = QuantiseOperation()


# --- the PyTorch operator


def quantise(x: torch.Tensor, factor: torch.Tensor, *, rung: str | None = None) -> torch.Tensor:
    """x * factor as float8_e4m3fn, to nearest and saturating at ±448; any shape, the result in its layout.

    `factor` is one fp32 number on x's device. Not differentiable.
    """
    return OPERATOR(x, factor, rung)


def _plan(x: torch.Tensor, factor: torch.Tensor, rung: str | None = None) -> CallPlan:
    return pointwise.plan(QUANTISE, lambda: QuantiseProblem(x.numel(), NAMES[x.dtype]), x, "x", dtype=E4M3)


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    raise UnsupportedError("quantise has no gradient; detach x, or call it under torch.no_grad()")


OPERATOR = define_planned("quantise", _plan, "x: ..., factor: 1 of float32", backward=_backward)
