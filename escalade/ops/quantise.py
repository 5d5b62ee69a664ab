"""Quantisation to FP8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from escalade.device.architecture import WITH_FP8
from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, Int64, KernelCall, Recipe
from escalade.device.strides import aligned
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import (
    DTYPES,
    E4M3,
    ELEMENT_BYTES,
    STORAGE,
    VECTOR_BYTES,
    dtype_of,
    element,
    to_e4m3,
)
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference
from escalade.ops.base.rung import C, Rung, ThreadsConfig
from escalade.ops.calling.executables import prepare_rung
from escalade.ops.calling.library import define, require_rung
from escalade.ops.shared import pointwise
from escalade.ops.shared.pointwise import PacksConfig, check

# --- the problem


@dataclass(frozen=True)
class QuantiseProblem(Named):
    """y = e4m3(x * factor) over `elements` elements: to nearest, within ±448. A NaN stays a NaN."""

    NAME: ClassVar = NamePattern(
        "quantization",
        "quantise_{elements}",
    )

    elements: int
    dtype: str = "fp32"
    """The dtype of x."""
    layout: str = "flat"
    batch: int = 1
    """Elements belong to no image; records of all operations have a batch."""

    def __post_init__(self) -> None:
        check("quantise", self.elements, self.batch, self.dtype, self.layout)

    @property
    def flops(self) -> int:
        return self.elements

    @property
    def bytes(self) -> int:
        return self.elements * (ELEMENT_BYTES[self.dtype] + 1) + 4

    @property
    def rounding(self) -> float:
        return 2.0**-24


# --- rungs, pointwise: the rungs of quantise: an element a thread, and 16 bytes an access


"""The older ones have no conversion to e4m3."""


@dataclass(frozen=True)
class _Quantiser(Rung[QuantiseProblem, C]):
    @property
    def architectures(self) -> tuple[str, ...]:
        return WITH_FP8

    def supports(self, problem: QuantiseProblem) -> str | None:
        return None


@dataclass(frozen=True)
class Naive(_Quantiser[ThreadsConfig]):
    def configs(self, problem: QuantiseProblem) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 512, 128))

    def recipe(self, problem: QuantiseProblem, config: ThreadsConfig) -> Recipe:
        constants: dict[str, Constant] = {"Element": element(problem.dtype)}
        program = Program.of("quantise/naive.cu", "quantise_naive", constants)
        return _launch(problem, program, blocks(problem.elements, config.threads), config.threads)


@dataclass(frozen=True)
class Vectorised(_Quantiser[PacksConfig]):
    def configs(self, problem: QuantiseProblem) -> tuple[PacksConfig, ...]:
        """Offers as many packs a thread as leave enough blocks to go round."""
        every = [PacksConfig(threads, packs) for threads in (256, 512, 128) for packs in (4, 2, 1, 8)]
        fits = (config for config in every if _vector_blocks(problem, config) >= self.card.busy_blocks)
        default = next(fits, PacksConfig(packs=1))
        return (default, *(config for config in every if config != default))

    def recipe(self, problem: QuantiseProblem, config: PacksConfig) -> Recipe:
        constants: dict[str, Constant] = {
            "Element": element(problem.dtype),
            "PACKS": config.packs,
            "THREADS": config.threads,
        }
        program = Program.of("quantise/vectorised.cu", "quantise_vectorised", constants)
        return _launch(problem, program, _vector_blocks(problem, config), config.threads)


def _vector_blocks(problem: QuantiseProblem, config: PacksConfig) -> int:
    vector = VECTOR_BYTES // ELEMENT_BYTES[problem.dtype]
    return blocks(problem.elements // vector, config.threads * config.packs)


def _launch(problem: QuantiseProblem, program: Program, grid: int, threads: int) -> Recipe:
    arguments = (Buffer("x"), Buffer("factor"), Buffer("y"), Int64(problem.elements))
    return Recipe((KernelCall(program, (grid, 1, 1), (threads, 1, 1), arguments, overlap=True),))


# Predictions are for 51,380,224 elements in fp16, 154 MB to move: 36 us at 4.24 TB/s. An element a thread has at
# most 2,048 loads of 2 bytes under way on an SM; at 0.7 us each, 132 SMs read 0.77 TB/s: 133 us.
RUNGS: tuple[Rung[QuantiseProblem], ...] = (
    Naive("naive", "an element a thread", None, None),
    Vectorised(
        "vectorised", "16 bytes a load, several under way in a thread, converted in pairs", "naive", 3.5
    ),
)


# --- problems to measure and to test


PROBLEMS = (
    QuantiseProblem(200_704),
    QuantiseProblem(6_422_528),
    QuantiseProblem(51_380_224),
)
"""What ResNet-18's stem gives, 64 channels 56², at batch 1, 32 and 256."""

SMALL_PROBLEMS = (QuantiseProblem(1), QuantiseProblem(1003), QuantiseProblem(8192), QuantiseProblem(9001))


# --- the reference


def random_inputs(problem: QuantiseProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn(problem.elements, generator=generator, device=device).to(STORAGE[problem.dtype])
    return {"x": x, "factor": torch.tensor([37.5], device=device)}


def empty_output(problem: QuantiseProblem, device: torch.device) -> torch.Tensor:
    return torch.empty(problem.elements, dtype=E4M3, device=device)


def exact(problem: QuantiseProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The values in float64, before they are rounded: what rounding costs is the peer's error too."""
    return inputs["x"].double() * inputs["factor"].double()


def peer(problem: QuantiseProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The values rounded to E4M3 by PyTorch."""
    return to_e4m3(inputs["x"].float() * inputs["factor"])


# --- the operation


class Quantise(Operation[QuantiseProblem]):
    name = "quantise"
    problem = QuantiseProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("quantise", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = pointwise.LAYOUTS

    def preferred(self, problem: QuantiseProblem) -> tuple[str, ...]:
        return ("vectorised",)


QUANTISE = Quantise()


# --- the PyTorch operator


def quantise(x: torch.Tensor, factor: torch.Tensor, *, rung: str | None = None) -> torch.Tensor:
    """x * factor as float8_e4m3fn, to nearest and within ±448; a tensor of any shape, the result in its layout.

    `factor` is one fp32 number on x's device. There is no gradient.
    """
    return OPERATOR(x, factor, rung)


def _check(x: torch.Tensor, factor: torch.Tensor) -> str:
    dtype = dtype_of("quantise", x)
    if factor.dtype != torch.float32 or factor.numel() != 1 or factor.device != x.device:
        raise UnsupportedError(
            f"factor is {factor.dtype} of shape {tuple(factor.shape)} on {factor.device}; quantise takes one float32 "
            f"number on {x.device}"
        )
    return dtype


def _run(x: torch.Tensor, factor: torch.Tensor, rung: str | None = None) -> torch.Tensor:
    problem = QuantiseProblem(x.numel(), _check(x, factor))
    y = torch.empty_like(x, dtype=E4M3)
    if problem.elements == 0:
        require_rung(QUANTISE, rung)
        return y
    dense = x if x.stride() == y.stride() else torch.empty_like(x).copy_(x)
    prepare_rung(QUANTISE, problem, x.device, rung).run({"x": aligned(dense), "factor": factor, "y": y})
    return y


def _fake(x: torch.Tensor, factor: torch.Tensor, rung: str | None = None) -> torch.Tensor:
    _check(x, factor)
    return torch.empty_like(x, dtype=E4M3)


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    raise UnsupportedError("quantise has no gradient; detach x, or call it under torch.no_grad()")


OPERATOR = define(
    "quantise(Tensor x, Tensor factor, str? rung=None) -> Tensor",
    _run,
    _fake,
    backward=_backward,
)
