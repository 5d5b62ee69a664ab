"""Up to sixteen bytes of a row a thread in NCHW, where each pixel has as many copies as every other."""

from __future__ import annotations

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.shared import pooling
from escalade.ops.upsample2d_backward.problem import Upsample2dBackwardProblem

MOST_COLUMNS = 8
"""Copies of a pixel along a row: the code has no loop over them."""
MOST_UNROLLED = 16
"""Loads of a thread up to which the code has no loop over rows of copies either."""


def _vector(problem: Upsample2dBackwardProblem) -> int:
    return widest_vector(problem.dtype, problem.forward.width)


class Rows(Rung[Upsample2dBackwardProblem]):
    def supports(self, problem: Upsample2dBackwardProblem) -> str | None:
        f = problem.forward
        if f.layout != "nchw":
            return f"{self.name} takes layout nchw, not {f.layout}"
        if problem.even is None or problem.even[1] > MOST_COLUMNS:
            return (
                f"{self.name} takes the nearest pixel at sizes that are powers of two apart, and up to {MOST_COLUMNS} "
                "copies of it along a row"
            )
        if f.elements // _vector(problem) >= 2**31:
            return f"{self.name} counts threads in 32 bits; there are too many for {problem.name}"
        return None

    def configs(self, problem: Upsample2dBackwardProblem) -> tuple[Config, ...]:
        return (ThreadsConfig(128),)

    def recipe(self, problem: Upsample2dBackwardProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig) and problem.even is not None
        f, vector = problem.forward, _vector(problem)
        rows, columns = problem.even
        constants: dict[str, Constant] = {
            **pooling.constants(f),
            "VECTOR": vector,
            "MOST_ROWS": rows,
            "MOST_COLUMNS": columns,
            "UNROLLED_ROWS": rows if rows * columns <= MOST_UNROLLED else 1,
        }
        call = KernelCall(
            Program.of("upsample2d_backward/rows.cu", "upsample2d_backward_rows", constants),
            (blocks(f.elements // vector, config.threads), 1, 1),
            (config.threads, 1, 1),
            (Buffer("gradient"), Buffer("y"), pooling.shape(f)),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 256 channels of 16 x 16 to 32 x 32, nearest, batch 256, fp16: 168 MB, 39 us.
ROWS = Rows(
    "rows",
    "up to 16 bytes of a row a thread in NCHW, all copies of its pixels loaded by packs",
    below="per_pixel",
    # 17 million threads of 300 instructions (180 us) against 45 us: a tenth more than the rate of memory.
    predicted_gain=4.0,
)
