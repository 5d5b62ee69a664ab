"""Pointwise problems as strided tensors with an expression, and their rungs.

NHWC, NCHW, per-channel and per-image operands differ only in their strides over the result's dimensions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from escalade.device.program import Constant, Macro, Program
from escalade.device.recipe import Argument, Buffer, Int64, Ints, Recipe
from escalade.device.strides import aligned
from escalade.errors import UnsupportedError
from escalade.ops.base.checks import require
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, STORAGE, element, full_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.launch import launch
from escalade.ops.base.operation import Operation
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.problem import P, Problem
from escalade.ops.base.rung import Config, Rung, ThreadsConfig, ThreadsRung, first_that
from escalade.ops.calling.call import CallPlan, Packer
from escalade.ops.calling.executables import prepare_rung
from escalade.ops.calling.library import require_rung
from escalade.ops.expressions import Expression

LAYOUTS = ("flat",)
_MANY = 2**31
_IN_FLIGHT = 8
"""16-byte accesses in flight per thread. Over all threads of an SM that is more than 64 KiB, above DRAM latency times
bandwidth per SM."""


@dataclass(frozen=True)
class Operand:
    """An input of a pointwise problem, with its strides over the result's dimensions, 0 where it is broadcast."""

    name: str
    strides: tuple[int, ...]
    dtype: str


class Pointwise(Problem, Protocol):
    """y = expression(operands) for each element of a dense result; more results are y1, y2, …"""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def operands(self) -> tuple[Operand, ...]:
        """One per input of the expression, in the same order."""
        ...

    @property
    def program(self) -> Expression: ...


def check(operation: str, elements: int, batch: int, dtype: str, layout: str) -> None:
    """Check the fields that all pointwise problems share."""
    require(operation, "dtype", dtype, DTYPES)
    require(operation, "layout", layout, LAYOUTS)
    if elements < 0:
        raise UnsupportedError(f"{elements} elements: the number must not be negative")
    if batch != 1:
        raise UnsupportedError(f"batch {batch}: {operation} counts elements, and its batch must be 1")


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return row-major strides."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def result_names(program: Expression) -> tuple[str, ...]:
    """Return the buffers of the results."""
    return ("y", *(f"y{number}" for number in range(1, len(program.results))))


@dataclass(frozen=True)
class PacksConfig(Config):
    threads: int = 256
    packs: int = 4
    """Accesses of up to 16 bytes in flight per thread."""


@dataclass(frozen=True)
class ElementPerThread(ThreadsRung[P]):
    """A rung with one thread per element, for every problem."""

    threads = (256, 512, 128)

    def supports(self, problem: P) -> str | None:
        return unsupported_pitch(self.name, problem)


@dataclass(frozen=True)
class Naive(ElementPerThread[Pointwise]):
    def recipe(self, problem: Pointwise, config: ThreadsConfig) -> Recipe:
        accesses = ["DENSE" if _is_dense(problem, one) else "APART" for one in problem.operands]
        program = Program.of("pointwise/naive.cu", constants=_generated(problem, accesses), problem=problem)
        grid = blocks(math.prod(problem.shape), config.threads)
        return _launch(problem, program, problem.shape, grid, config.threads)


@dataclass(frozen=True)
class Vectorized(Rung[Pointwise, PacksConfig]):
    """16-byte accesses, several per thread."""

    def supports(self, problem: Pointwise) -> str | None:
        walks = any(access == "EACH" for access in _accesses(problem))
        if walks and math.prod(problem.shape) >= _MANY:
            return (
                f"rows of {problem.shape[-1]} elements are not whole packs, and indices beyond 2^31 need 64 bits; "
                "use the rung `naive`"
            )
        return None

    def configs(self, problem: Pointwise) -> tuple[PacksConfig, ...]:
        """Prefer one pack per thread where one tensor is streamed, else the most that fit the registers and leave
        enough CTAs to fill the card.

        relu of 1 GB in fp32 takes 503 us with one pack per thread, 520 with four: the pieces of memory that CTAs read
        and write at any time are closer to each other. With two inputs it makes no difference.
        """
        every = [PacksConfig(threads, packs) for threads in (256, 512, 128) for packs in (4, 2, 1, 8)]
        streamed = _accesses(problem).count("DENSE")
        most = _IN_FLIGHT // streamed if streamed > 1 else 1

        def fits(config: PacksConfig) -> bool:
            return config.packs <= most and _vector_blocks(problem, config) >= self.card.busy_blocks

        return first_that(fits, every, PacksConfig(packs=1))

    def recipe(self, problem: Pointwise, config: PacksConfig) -> Recipe:
        vector, accesses = full_vector(problem.dtype), _accesses(problem)
        generated = _generated(problem, accesses)
        program = Program.of(
            "pointwise/vectorised.cu", constants=generated, problem=problem, config=config, vector=vector
        )
        straddles = "EACH" in accesses or problem.shape[-1] % vector
        sizes = problem.shape if straddles else (*problem.shape[:-1], problem.shape[-1] // vector)
        return _launch(problem, program, sizes, _vector_blocks(problem, config), config.threads)


def _vector_blocks(problem: Pointwise, config: PacksConfig) -> int:
    return blocks(math.prod(problem.shape) // full_vector(problem.dtype), config.threads * config.packs)


def _is_dense(problem: Pointwise, operand: Operand) -> bool:
    return operand.strides == dense_strides(problem.shape)


def _accesses(problem: Pointwise) -> list[str]:
    """Return how packs of each operand are read: see kernels/pointwise/pointwise.cuh."""
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


def _generated(problem: Pointwise, accesses: Sequence[str]) -> dict[str, Constant]:
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
    return launch(program, grid, threads, *arguments)


def reciprocal(size: int) -> tuple[int, int]:
    """Return multiplier and shift that divide any number below 2^31 by `size`: see `Walk` in pointwise.cuh."""
    if size <= 1:
        return 0, 0
    bits = (size - 1).bit_length()
    return -(-(2 ** (31 + bits)) // size), bits - 1


# --- for references


def random_operand(problem: Pointwise, operand: Operand, draw: Draw) -> torch.Tensor:
    """Return normal deviates wide enough that some exceed 6; zeros and ones for an integer operand."""
    spans = zip(problem.shape, operand.strides, strict=True)
    elements = 1 + sum((size - 1) * stride for size, stride in spans) if math.prod(problem.shape) else 0
    storage = STORAGE[operand.dtype]
    if not storage.is_floating_point:
        return draw.integers(2, elements).to(storage)
    return draw.normal(elements).mul_(4).to(storage)


def random_inputs(problem: Pointwise, draw: Draw) -> dict[str, torch.Tensor]:
    return {one.name: random_operand(problem, one, draw) for one in problem.operands}


def empty_output(problem: Pointwise, device: torch.device) -> torch.Tensor:
    return torch.empty(problem.shape, dtype=STORAGE[problem.dtype], device=device)


# --- tensors


def ordered_like(tensor: torch.Tensor, pattern: torch.Tensor) -> torch.Tensor:
    """Return the tensor with the strides of `pattern`; itself if it has them."""
    if tensor.stride() == pattern.stride():
        return aligned(tensor)
    return torch.empty_like(pattern).copy_(tensor)


def packer_like(pattern: torch.Tensor) -> Packer:
    """Return a packer of tensors into the strides of `pattern`."""
    size, stride = tuple(pattern.shape), pattern.stride()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.stride() == stride:
            return tensor
        return torch.empty_strided(size, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)

    return pack


def plan(
    operation: Operation[Any],
    problem: Callable[[], Problem],
    x: torch.Tensor,
    *inputs: str,
    dtype: torch.dtype | None = None,
) -> CallPlan:
    """Plan a result with x's memory order, without gaps, from tensors of its shape."""
    packers = dict.fromkeys(inputs, packer_like(torch.empty_like(x, device="meta")))
    return CallPlan(operation, lambda: torch.empty_like(x, dtype=dtype), problem, packers)


def run(
    operation: Operation[Any],
    problem: Pointwise,
    tensors: Mapping[str, torch.Tensor],
    y: torch.Tensor,
    rung: str | None,
) -> None:
    """Run on tensors of y's shape. y is dense, and may be one of them."""
    if math.prod(problem.shape) == 0:
        require_rung(operation, rung)
        return
    prepared = prepare_rung(operation, problem, y.device, rung)
    prepared.run({**{name: ordered_like(tensor, y) for name, tensor in tensors.items()}, "y": y})
