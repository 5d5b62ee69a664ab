"""Sums of filter taps, for convolutions over repeated pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from escalade.device.program import Program
from escalade.device.recipe import Buffer, Ints, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.launch import launch
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference, Tensors, in_float64
from escalade.ops.base.rung import ThreadsConfig, ThreadsRung
from escalade.ops.shared.images import Images, check_problem, empty_images, require_32_bits

# --- the problem


LAYOUTS = ("nhwc",)


@dataclass(frozen=True)
class FilterSumsProblem(Images, Named):
    """y[c, f, i, j] = sum of x[f, c] over the window of 2 x 2 taps at (rows - 1 - i, columns - 1 - j).

    x is [filters, channels, height, width], with the filters as the batch, and y has rows * columns taps, one per
    window; `zeros` adds a border of zeros to x. A filter over pixels that are each repeated 2 x 2 times is thus a
    (transposed) filter over the pixels themselves. Without zeros it maps that filter's gradient back.
    """

    NAME: ClassVar = NamePattern("sum of filters", "{channels}_{height,width}{zeros?_zeros}_b{batch}")

    zeros: bool = False
    dtype: str = "fp32"
    layout: str = "nhwc"

    rounding = 3 * 2.0**-24

    def __post_init__(self) -> None:
        check_problem("filter_sums", self, DTYPES, LAYOUTS)
        if min(self.rows, self.columns) < 1:
            raise UnsupportedError(f"filters of {self.height} x {self.width} have no window of 2 x 2 taps")
        require_32_bits("filter_sums", max(self.channels, self.batch) * (self.height + 1) * (self.width + 1))

    @property
    def rows(self) -> int:
        return self.height + 2 * self.zeros - 1

    @property
    def columns(self) -> int:
        return self.width + 2 * self.zeros - 1

    @property
    def output_elements(self) -> int:
        return self.batch * self.channels * self.rows * self.columns

    @property
    def flops(self) -> int:
        return 3 * self.output_elements

    @property
    def bytes(self) -> int:
        return (self.elements + self.output_elements) * ELEMENT_BYTES[self.dtype]


# --- rungs


_TILE = 32  # filters and channels per tile
_STATIC_SHARED_BYTES = 48 * 1024
_FP32_BYTES = 4


def _arguments(problem: FilterSumsProblem) -> tuple[Buffer, Buffer, Ints]:
    return Buffer("x"), Buffer("y"), Ints.of("filter_sums/filters.cuh", "Filters", problem=problem)


class Naive(ThreadsRung[FilterSumsProblem]):
    def recipe(self, problem: FilterSumsProblem, config: ThreadsConfig) -> Recipe:
        program = Program.of("filter_sums/naive.cu", problem=problem)
        grid = blocks(problem.output_elements, config.threads)
        return launch(program, grid, config.threads, *_arguments(problem))


class Tiled(ThreadsRung[FilterSumsProblem]):
    threads = (512, 256)

    def supports(self, problem: FilterSumsProblem) -> str | None:
        if problem.width * _TILE * (_TILE + 1) * _FP32_BYTES > _STATIC_SHARED_BYTES:
            return f"{self.name} holds a row of a tile of filters in shared memory, which {problem.width} taps exceed"
        return None

    def recipe(self, problem: FilterSumsProblem, config: ThreadsConfig) -> Recipe:
        p = problem
        return launch(
            Program.of("filter_sums/tiled.cu", problem=p, config=config),
            (blocks(p.batch, _TILE), blocks(p.channels, _TILE), p.rows),
            config.threads,
            *_arguments(p),
        )


# Predictions are for 256 filters of 128 channels and 3 x 3 taps, fp16: 1.6 MB, all of it in L2.
NAIVE = Naive("naive", "one thread per element of the result", None, None)
TILED = Tiled(
    "tiled",
    "two rows of 32 filters of 32 channels are transposed in shared memory, so that both sides are coalesced",
    below="naive",
    # naive: 2 M reads of a sector each, 67 MB out of L2 (12 us); 2 MB and a launch are 3.
    predicted_gain=4.0,
)


# --- the reference


def summed(x: torch.Tensor, zeros: bool) -> torch.Tensor:
    sums = F.avg_pool2d(x, 2, stride=1, padding=int(zeros), divisor_override=1)
    return sums.flip(2, 3).transpose(0, 1)


def random_inputs(problem: FilterSumsProblem, draw: Draw) -> dict[str, torch.Tensor]:
    p = problem
    return {"x": draw.stored(p, p.batch, p.channels, p.height, p.width)}


def peer(problem: FilterSumsProblem, inputs: Tensors) -> torch.Tensor:
    return summed(inputs["x"], problem.zeros)


def empty_output(problem: FilterSumsProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(p, (p.channels, p.batch, p.rows, p.columns), device)


# --- the operation


class FilterSumsOperation(Operation[FilterSumsProblem]):
    name = "filter_sums"
    problem = FilterSumsProblem
    in_pytorch = Reference(random_inputs, empty_output, in_float64(peer), peer)
    ladder = Ladder("filter_sums", (NAIVE, TILED))
    problems = (
        FilterSumsProblem(256, 128, 3, 3, zeros=True),
        FilterSumsProblem(128, 256, 4, 4),
        FilterSumsProblem(3, 256, 3, 3, zeros=True),
    )
    """Problems of `escalade ladder`: a decoder's filters, their gradients, and those of its last layer."""
    small_problems = (
        FilterSumsProblem(34, 40, 3, 2, zeros=True),
        FilterSumsProblem(3, 65, 2, 5),
    )
    """Small problems: partial tiles both ways, zeros and none, and narrow and wide filters."""
    dtypes = DTYPES
    layouts = LAYOUTS
    order = ("tiled", "naive")


FILTER_SUMS = FilterSumsOperation()
