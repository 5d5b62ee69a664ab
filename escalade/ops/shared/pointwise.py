"""What operations on single elements share: problems as tensors with strides and an expression, and the rungs for them.

NHWC and NCHW, a value for each channel and one for each image are only different strides over the result's dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from escalade.device.program import Constant, Macro, Program
from escalade.device.recipe import Argument, Buffer, Int64, Ints, KernelCall, Recipe
from escalade.device.strides import aligned
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require
from escalade.ops.base.dtypes import DTYPES, STORAGE, element, full_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.operation import Operation
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.problem import P, Problem
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.calling.call import Lay, Plan, launched
from escalade.ops.calling.executables import ready
from escalade.ops.calling.library import require_rung
from escalade.ops.expressions import Expression

LAYOUTS = ("flat",)
_MANY = 2**31
_IN_FLIGHT = 8
"""Accesses of 16 bytes that a thread has under way by itself: with those of its neighbours more than 64 KiB for each
multiprocessor, which is what memory takes to answer times what it gives."""


@dataclass(frozen=True)
class Operand:
    """An input of a pointwise problem: elements from one to the next along each of the result's dimensions, 0 where it
    is broadcast."""

    name: str
    strides: tuple[int, ...]
    dtype: str


class Pointwise(Problem, Protocol):
    """y = expression(operands) for each element of a dense result; further results are y1, y2, …"""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def operands(self) -> tuple[Operand, ...]:
        """One for each input of the expression, in the order of those."""
        ...

    @property
    def program(self) -> Expression: ...


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


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of elements that lie in order without gaps."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def result_names(program: Expression) -> tuple[str, ...]:
    """The buffers of the results."""
    return ("y", *(f"y{number}" for number in range(1, len(program.results))))


@dataclass(frozen=True)
class PacksConfig(Config):
    threads: int = 256
    packs: int = 4
    """Accesses of up to 16 bytes that a thread has under way."""


@dataclass(frozen=True)
class ElementAThread(Rung[P, ThreadsConfig]):
    """A rung with one thread an element, for every problem."""

    def supports(self, problem: P) -> str | None:
        return unsupported_pitch(self.name, problem)

    def configs(self, problem: P) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 512, 128))


@dataclass(frozen=True)
class Naive(ElementAThread[Pointwise]):
    def recipe(self, problem: Pointwise, config: ThreadsConfig) -> Recipe:
        accesses = ["DENSE" if _is_dense(problem, one) else "APART" for one in problem.operands]
        program = Program.of("pointwise/naive.cu", "pointwise_naive", _constants(problem, accesses))
        grid = blocks(math.prod(problem.shape), config.threads)
        return _launch(problem, program, problem.shape, grid, config.threads)


@dataclass(frozen=True)
class Vectorised(Rung[Pointwise, PacksConfig]):
    """16 bytes an access, several accesses a thread."""

    def supports(self, problem: Pointwise) -> str | None:
        walks = any(access == "EACH" for access in _accesses(problem))
        if walks and math.prod(problem.shape) >= _MANY:
            return (
                f"rows of {problem.shape[-1]} elements are no whole packs, and places of elements beyond 2^31 need 64 "
                "bits; the rung `naive` takes any"
            )
        return None

    def configs(self, problem: Pointwise) -> tuple[PacksConfig, ...]:
        """Offers as many packs a thread as there are registers for and as leave enough blocks to go round."""
        every = [PacksConfig(threads, packs) for threads in (256, 512, 128) for packs in (4, 2, 1, 8)]
        most = max(1, _IN_FLIGHT // max(1, _accesses(problem).count("DENSE")))
        fits = (
            config
            for config in every
            if config.packs <= most and _vector_blocks(problem, config) >= self.card.filling
        )
        default = next(fits, PacksConfig(packs=1))
        return (default, *(config for config in every if config != default))

    def recipe(self, problem: Pointwise, config: PacksConfig) -> Recipe:
        vector, accesses = full_vector(problem.dtype), _accesses(problem)
        constants = {
            **_constants(problem, accesses),
            "VECTOR": vector,
            "PACKS": config.packs,
            "THREADS": config.threads,
        }
        program = Program.of("pointwise/vectorised.cu", "pointwise_vectorised", constants)
        straddles = "EACH" in accesses or problem.shape[-1] % vector
        sizes = problem.shape if straddles else (*problem.shape[:-1], problem.shape[-1] // vector)
        return _launch(problem, program, sizes, _vector_blocks(problem, config), config.threads)


def _vector_blocks(problem: Pointwise, config: PacksConfig) -> int:
    return blocks(math.prod(problem.shape) // full_vector(problem.dtype), config.threads * config.packs)


def _is_dense(problem: Pointwise, operand: Operand) -> bool:
    return operand.strides == dense_strides(problem.shape)


def _accesses(problem: Pointwise) -> list[str]:
    """How packs of each operand are read: see kernels/pointwise/pointwise.cuh."""
    return [_access(problem, operand) for operand in problem.operands]


def _access(problem: Pointwise, operand: Operand) -> str:
    if _is_dense(problem, operand):
        return "DENSE"
    vector = full_vector(problem.dtype)
    if problem.shape[-1] % vector:
        return "EACH"
    *outer, inner = operand.strides
    if inner == 1:
        return "ALONG" if all(stride % vector == 0 for stride in outer) else "APART"
    return "APART" if inner else "SAME"


def _constants(problem: Pointwise, accesses: Sequence[str]) -> dict[str, Constant]:
    results = range(len(problem.program.results))
    parameters = [f"const In{number}* in{number}" for number in range(len(problem.operands))]
    parameters += [f"Out{number}* out{number}" for number in results]
    inputs = " ".join(f"INPUT({number}, {access})" for number, access in enumerate(accesses))
    return {
        **problem.program.constants(problem.dtype),
        **{f"In{number}": element(operand.dtype) for number, operand in enumerate(problem.operands)},
        **{f"Out{number}": element(problem.dtype) for number in results},
        "PARAMETERS": Macro(", ".join(parameters)),
        "INPUTS": Macro(inputs),
        "RESULTS": Macro(" ".join(f"RESULT({number})" for number in results)),
        "RANK": len(problem.shape),
    }


def _launch(problem: Pointwise, program: Program, sizes: Sequence[int], grid: int, threads: int) -> Recipe:
    magic, shift = zip(*map(reciprocal, sizes), strict=True)
    strides = (stride for operand in problem.operands for stride in operand.strides)
    arguments: tuple[Argument, ...] = (
        *(Buffer(operand.name) for operand in problem.operands),
        *map(Buffer, result_names(problem.program)),
        Ints((*sizes, *magic, *shift, *strides)),
        Int64(math.prod(problem.shape)),
    )
    return Recipe((KernelCall(program, (grid, 1, 1), (threads, 1, 1), arguments, overlap=True),))


def reciprocal(size: int) -> tuple[int, int]:
    """A product and a shift that divide any number below 2^31 by the size: see `Walk` of pointwise.cuh."""
    if size <= 1:
        return 0, 0
    bits = (size - 1).bit_length()
    return -(-(2 ** (31 + bits)) // size), bits - 1


# --- what references need


def random_operand(
    problem: Pointwise, operand: Operand, device: torch.device, generator: torch.Generator
) -> torch.Tensor:
    """Normal deviates, wide enough that a limit of 6 is passed by some; bytes where it is of those."""
    spans = zip(problem.shape, operand.strides, strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in spans) if math.prod(problem.shape) else 0
    storage = STORAGE[operand.dtype]
    if not storage.is_floating_point:
        return torch.randint(0, 2, (elements,), generator=generator, device=device).to(storage)
    return torch.randn(elements, generator=generator, device=device).mul_(4).to(storage)


def random_inputs(problem: Pointwise, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(seed)
    return {one.name: random_operand(problem, one, device, generator) for one in problem.operands}


def empty_output(problem: Pointwise, device: torch.device) -> torch.Tensor:
    return torch.empty(problem.shape, dtype=STORAGE[problem.dtype], device=device)


# --- tensors


def ordered_like(tensor: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    """The tensor with its elements in memory in the order of the pattern's, without gaps; itself if it is so."""
    if tensor.stride() == pattern.stride():
        return aligned(tensor)
    return torch.empty_like(pattern).copy_(tensor)


def ordering(pattern: torch.Tensor) -> Lay:
    """How tensors lie whose elements are to be in memory in the order of the pattern's, without gaps."""
    size, stride = tuple(pattern.shape), pattern.stride()

    def lay(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.stride() == stride:
            return tensor
        return torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

    return lay


def plan(
    operation: Operation[Any], problem: Pointwise, inputs: Sequence[str], x: torch.Tensor, rung: str | None
) -> Plan:
    """A result that lies as x does, but without gaps, of tensors of its shape."""
    y = torch.empty_like(x, device="meta")
    prepared = launched(operation, problem, x.device, rung, math.prod(problem.shape))
    return Plan(prepared, {"y": y}, dict.fromkeys(inputs, ordering(y)))


def run(
    operation: Operation[Any],
    problem: Pointwise,
    tensors: Mapping[str, torch.Tensor],
    y: torch.Tensor,
    rung: str | None,
) -> None:
    """Runs over tensors of y's shape. y is dense, and may be one of them."""
    if math.prod(problem.shape) == 0:
        require_rung(operation, rung)
        return
    prepared = ready(operation, problem, y.device, rung)
    prepared.run({**{name: ordered_like(tensor, y) for name, tensor in tensors.items()}, "y": y})
