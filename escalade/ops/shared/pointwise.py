"""What operations on single elements share: rungs over flat arrays, and how tensors of any strides reach them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, Int64, KernelCall, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require
from escalade.ops.base.dtypes import DTYPES, STORAGE, element, full_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.operation import Operation
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.problem import P, Problem
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.calling.executables import aligned, ready
from escalade.ops.calling.library import require_rung

LAYOUTS = ("flat",)


class Pointwise(Problem, Protocol):
    """y = clip(x + residual) over `elements` elements: the residual, the floor at 0 and the limit are optional."""

    @property
    def elements(self) -> int: ...
    @property
    def residual(self) -> bool: ...
    @property
    def relu(self) -> bool: ...
    @property
    def limit(self) -> float | None: ...


def check(operation: str, elements: int, batch: int, dtype: str, layout: str) -> None:
    """Checks what every pointwise problem must be."""
    require(operation, "dtype", dtype, DTYPES)
    require(operation, "layout", layout, LAYOUTS)
    if elements < 0:
        raise UnsupportedError(f"{elements} elements: there cannot be fewer than none")
    if batch != 1:
        raise UnsupportedError(
            f"a batch of {batch}: {operation} takes elements, whatever images they belong to"
        )


@dataclass(frozen=True)
class PacksConfig(Config):
    threads: int = 256
    packs: int = 4
    """Accesses of up to 16 bytes that a thread has under way."""


@dataclass(frozen=True)
class ElementAThread(Rung[P]):
    """A rung with one thread an element, for every problem."""

    def supports(self, problem: P) -> str | None:
        return unsupported_pitch(self.name, problem)

    def configs(self, problem: P) -> tuple[Config, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 512, 128))


@dataclass(frozen=True)
class Naive(ElementAThread[Pointwise]):
    def recipe(self, problem: Pointwise, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        program = Program.of("pointwise/naive.cu", "pointwise_naive", _constants(problem))
        return _launch(problem, program, blocks(problem.elements, config.threads), config.threads)


@dataclass(frozen=True)
class Vectorised(Rung[Pointwise]):
    """16 bytes an access, several accesses a thread."""

    def supports(self, problem: Pointwise) -> str | None:
        return None

    def configs(self, problem: Pointwise) -> tuple[Config, ...]:
        """Offers as many packs a thread as leave enough blocks to go round."""
        every = [PacksConfig(threads, packs) for threads in (256, 512, 128) for packs in (4, 2, 1, 8)]
        fits = (config for config in every if _vector_blocks(problem, config) >= self.card.filling)
        default = next(fits, PacksConfig(packs=1))
        return (default, *(config for config in every if config != default))

    def recipe(self, problem: Pointwise, config: Config) -> Recipe:
        assert isinstance(config, PacksConfig)
        constants = {
            **_constants(problem),
            "VECTOR": full_vector(problem.dtype),
            "PACKS": config.packs,
            "THREADS": config.threads,
        }
        program = Program.of("pointwise/vectorised.cu", "pointwise_vectorised", constants)
        return _launch(problem, program, _vector_blocks(problem, config), config.threads)


def _vector_blocks(problem: Pointwise, config: PacksConfig) -> int:
    return blocks(problem.elements // full_vector(problem.dtype), config.threads * config.packs)


def _constants(problem: Pointwise) -> dict[str, Constant]:
    return {
        "Element": element(problem.dtype),
        "HAS_RESIDUAL": problem.residual,
        "HAS_RELU": problem.relu,
        "HAS_LIMIT": problem.limit is not None,
    }


def _launch(problem: Pointwise, program: Program, grid: int, threads: int) -> Recipe:
    arguments = (
        Buffer("x"),
        Buffer("residual", optional=True),
        Buffer("y"),
        0.0 if problem.limit is None else float(problem.limit),  # an int would be passed as one
        Int64(problem.elements),
    )
    return Recipe((KernelCall(program, (grid, 1, 1), (threads, 1, 1), arguments, overlap=True),))


def random_input(problem: Pointwise, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Normal deviates, wide enough that a limit of 6 is passed by some."""
    values = torch.randn(problem.elements, generator=generator, device=device).mul_(4)
    return values.to(STORAGE[problem.dtype])


def empty_output(problem: Pointwise, device: torch.device) -> torch.Tensor:
    return torch.empty(problem.elements, dtype=STORAGE[problem.dtype], device=device)


# --- tensors


def ordered_like(tensor: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    """The tensor with its elements in memory in the order of the pattern's, without gaps; itself if it is so."""
    if tensor.stride() == pattern.stride():
        return aligned(tensor)
    return torch.empty_like(pattern).copy_(tensor)


def run(
    operation: Operation[Any],
    problem: Pointwise,
    tensors: Mapping[str, torch.Tensor],
    y: torch.Tensor,
    rung: str | None,
) -> None:
    """Runs over tensors of y's shape. y is dense, and may be one of them."""
    if problem.elements == 0:
        require_rung(operation, rung)
        return
    prepared = ready(operation, problem, y.device, rung)
    prepared.run({**{name: ordered_like(tensor, y) for name, tensor in tensors.items()}, "y": y})
