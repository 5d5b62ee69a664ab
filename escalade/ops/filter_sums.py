"""Filters of convolutions whose pixels are repeated, summed up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, Ints, KernelCall, Recipe
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import DTYPES, ELEMENT_BYTES, element
from escalade.ops.base.grid import blocks
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.naming import Named, NamePattern
from escalade.ops.base.operation import Operation, Reference
from escalade.ops.base.rung import Rung, ThreadsConfig
from escalade.ops.shared.images import Images, check_problem, empty_images, require_32_bits, stored_images

# --- the problem


LAYOUTS = ("nhwc",)


@dataclass(frozen=True)
class FilterSumsProblem(Images, Named):
    """y[c, f, i, j] = the sum of x[f, c] over the window of two by two taps at (rows - 1 - i, columns - 1 - j).

    x is [filters, channels, height, width], its filters the batch, and y has rows * columns taps, as many as there are
    such windows; with `zeros` there is a tap of zeros around x. So a filter over pixels that are there four times is
    one over the pixels themselves, from the other side, and without zeros its gradient is the filter's again.
    """

    NAME: ClassVar = NamePattern(
        "sum of filters",
        "{channels}_{height,width}{zeros?_zeros}_b{batch}",
    )

    zeros: bool = False
    dtype: str = "fp32"
    layout: str = "nhwc"

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

    @property
    def rounding(self) -> float:
        """Three additions of fp32."""
        return 3 * 2.0**-24


# --- rungs, sums: one thread per element, or tiles of filters and channels that are turned in shared memory


_TILE = 32
"""Filters and channels of a tile: a warp's."""
_STATIC_SHARED_BYTES = 48 * 1024
_FP32_BYTES = 4


def _arguments(problem: FilterSumsProblem) -> tuple[Buffer, Buffer, Ints]:
    """The buffers, and `Filters` of kernels/filter_sums/filters.cuh."""
    p = problem
    return Buffer("x"), Buffer("y"), Ints((p.batch, p.channels, p.height, p.width, p.rows, p.columns))


def _constants(problem: FilterSumsProblem) -> dict[str, Constant]:
    return {"Element": element(problem.dtype), "ZEROS": int(problem.zeros)}


class Naive(Rung[FilterSumsProblem, ThreadsConfig]):
    def supports(self, problem: FilterSumsProblem) -> str | None:
        return None

    def configs(self, problem: FilterSumsProblem) -> tuple[ThreadsConfig, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: FilterSumsProblem, config: ThreadsConfig) -> Recipe:
        call = KernelCall(
            Program.of("filter_sums/naive.cu", "filter_sums_naive", _constants(problem)),
            (blocks(problem.output_elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            _arguments(problem),
            overlap=True,
        )
        return Recipe((call,))


class Tiled(Rung[FilterSumsProblem, ThreadsConfig]):
    def supports(self, problem: FilterSumsProblem) -> str | None:
        if problem.width * _TILE * (_TILE + 1) * _FP32_BYTES > _STATIC_SHARED_BYTES:
            return f"{self.name} has a row of a tile of filters in shared memory; {problem.width} taps are too many"
        return None

    def configs(self, problem: FilterSumsProblem) -> tuple[ThreadsConfig, ...]:
        return tuple(ThreadsConfig(threads) for threads in (512, 256))

    def recipe(self, problem: FilterSumsProblem, config: ThreadsConfig) -> Recipe:
        p = problem
        constants = {**_constants(p), "WIDTH": p.width, "THREADS": config.threads}
        call = KernelCall(
            Program.of("filter_sums/tiled.cu", "filter_sums_tiled", constants),
            (blocks(p.batch, _TILE), blocks(p.channels, _TILE), p.rows),
            (config.threads, 1, 1),
            _arguments(p),
            overlap=True,
        )
        return Recipe((call,))


# Predictions are for 256 filters of 128 channels and 3 x 3 taps, fp16: 1.6 MB, all of it in L2.
NAIVE = Naive("naive", "one thread an element of the result", None, None)
TILED = Tiled(
    "tiled",
    "two rows of 32 filters of 32 channels are turned in shared memory, so that both sides move whole lines",
    below="naive",
    # naive: 2 M reads of a sector each, 67 MB out of L2 (12 us); 2 MB and a launch are 3.
    predicted_gain=4.0,
)


# --- problems to measure and to test


PROBLEMS = (
    FilterSumsProblem(256, 128, 3, 3, zeros=True),
    FilterSumsProblem(128, 256, 4, 4),
    FilterSumsProblem(3, 256, 3, 3, zeros=True),
)
"""What `escalade ladder filter_sums` measures: a decoder's filters, their gradients, and those of its last layer."""

SMALL_PROBLEMS = (
    FilterSumsProblem(34, 40, 3, 2, zeros=True),
    FilterSumsProblem(3, 65, 2, 5),
)
"""Small problems that between them have parts of tiles both ways, zeros and none, and narrow and wide filters."""


# --- the reference


def summed(x: torch.Tensor, zeros: bool) -> torch.Tensor:
    """PyTorch's result."""
    sums = F.avg_pool2d(x, 2, stride=1, padding=int(zeros), divisor_override=1)
    return sums.flip(2, 3).transpose(0, 1)


def random_inputs(problem: FilterSumsProblem, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn((p.batch, p.channels, p.height, p.width), generator=generator, device=device)
    return {"x": stored_images(p, x)}


def peer(problem: FilterSumsProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return summed(inputs["x"], problem.zeros)


def exact(problem: FilterSumsProblem, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The result in float64."""
    return summed(inputs["x"].double(), problem.zeros)


def empty_output(problem: FilterSumsProblem, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(p, (p.channels, p.batch, p.rows, p.columns), device)


# --- the operation


class FilterSums(Operation[FilterSumsProblem]):
    name = "filter_sums"
    problem = FilterSumsProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("filter_sums", (NAIVE, TILED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: FilterSumsProblem) -> tuple[str, ...]:
        return ("tiled", "naive")


FILTER_SUMS = FilterSums()
