"""One thread an element, or tiles of filters and channels that are turned in shared memory."""

from __future__ import annotations

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, Ints, KernelCall, Recipe
from escalade.ops.base.dtypes import element
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.filter_sums.problem import FilterSumsProblem

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


class Naive(Rung[FilterSumsProblem]):
    def supports(self, problem: FilterSumsProblem) -> str | None:
        return None

    def configs(self, problem: FilterSumsProblem) -> tuple[Config, ...]:
        return (ThreadsConfig(),)

    def recipe(self, problem: FilterSumsProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        call = KernelCall(
            Program.of("filter_sums/naive.cu", "filter_sums_naive", _constants(problem)),
            (blocks(problem.output_elements, config.threads), 1, 1),
            (config.threads, 1, 1),
            _arguments(problem),
            overlap=True,
        )
        return Recipe((call,))


class Tiled(Rung[FilterSumsProblem]):
    def supports(self, problem: FilterSumsProblem) -> str | None:
        if problem.width * _TILE * (_TILE + 1) * _FP32_BYTES > _STATIC_SHARED_BYTES:
            return f"{self.name} has a row of a tile of filters in shared memory; {problem.width} taps are too many"
        return None

    def configs(self, problem: FilterSumsProblem) -> tuple[Config, ...]:
        return tuple(ThreadsConfig(threads) for threads in (512, 256))

    def recipe(self, problem: FilterSumsProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
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
