"""Layer normalisation with a thread or a warp a row."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Argument, Buffer, KernelCall, Recipe
from escalade.ops.base.dtypes import element
from escalade.ops.base.grid import ceil_div
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.layer_norm.problem import LayerNormProblem
from escalade.ops.shared import activation, columns


def constants(problem: LayerNormProblem) -> dict[str, Constant]:
    return {
        "Element": element(problem.dtype),
        "HAS_MEAN": not problem.rms,
        "HAS_WEIGHT": problem.weight,
        "HAS_BIAS": problem.bias,
        **activation.constants_of(problem),
    }


def arguments(problem: LayerNormProblem) -> tuple[Argument, ...]:
    """The arguments of every kernel."""
    return (
        Buffer("x"),
        Buffer("weight", optional=True),
        Buffer("bias", optional=True),
        Buffer("y"),
        problem.rows,
        problem.features,
        float(problem.epsilon),
    )


def launch(problem: LayerNormProblem, program: Program, grid: int, threads: int) -> Recipe:
    call = KernelCall(program, (grid, 1, 1), (threads, 1, 1), arguments(problem), overlap=True)
    return Recipe((call,))


@dataclass(frozen=True)
class PerRow(Rung[LayerNormProblem]):
    row_threads: int
    threads: tuple[int, ...]

    def supports(self, problem: LayerNormProblem) -> str | None:
        return columns.refusal_of_dense(self.name, problem.inner)

    def configs(self, problem: LayerNormProblem) -> tuple[Config, ...]:
        return tuple(ThreadsConfig(threads) for threads in self.threads)

    def recipe(self, problem: LayerNormProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        program = Program.of(f"layer_norm/{self.name}.cu", f"layer_norm_{self.name}", constants(problem))
        grid = ceil_div(problem.batch * self.row_threads, config.threads)
        return launch(problem, program, grid, config.threads)


# Predictions are for 100,352 rows of 96 features in fp16: 19 MB in, 19 MB out, 9.2 us at the rate of a copy.
NAIVE = PerRow("naive", "one thread a row, in three passes", None, None, row_threads=1, threads=(64, 32, 128))

WARP_PER_ROW = PerRow(
    "warp_per_row",
    "a warp a row, summed by shuffles, in three passes of which two find the row in a cache",
    below="naive",
    # naive: 288 loads of 2 bytes a thread, each 32 sectors for a warp, 900 k sectors a multiprocessor at one a clock:
    # 0.5 ms. A warp a row: 9 loads, 10 shuffles and 3 stores, 760 warps a multiprocessor: 30 us.
    predicted_gain=17.0,
    row_threads=32,
    threads=(256, 128, 512),
)
