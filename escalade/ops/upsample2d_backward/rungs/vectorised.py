"""Sixteen bytes of channels a thread."""

from __future__ import annotations

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.shared import pixel_tiles, pooling
from escalade.ops.shared.pixel_tiles import ONE_PIXEL
from escalade.ops.upsample2d.rungs.arguments import constants
from escalade.ops.upsample2d_backward.problem import Upsample2dBackwardProblem

MOST_UNROLLED = 64
"""Outputs of a pixel up to which the code has no loop over them: four registers each, if all are under way."""


def _outputs(problem: Upsample2dBackwardProblem) -> dict[str, Constant]:
    """How wide accesses are, how many outputs a pixel has, and how many of them the code is written out for."""
    f = problem.forward
    rows, columns = problem.even or problem.most_outputs
    return {
        "VECTOR": widest_vector(f.dtype, f.channels),
        "EVEN": problem.even is not None,
        "MOST_ROWS": rows,
        "MOST_COLUMNS": columns,
        "UNROLLED_ROWS": rows if rows * columns <= MOST_UNROLLED else 1,
        "UNROLLED_COLUMNS": columns if columns <= MOST_UNROLLED else 1,
    }


class Vectorised(Rung[Upsample2dBackwardProblem]):
    def supports(self, problem: Upsample2dBackwardProblem) -> str | None:
        return pixel_tiles.refusal(self.name, problem.forward)

    def configs(self, problem: Upsample2dBackwardProblem) -> tuple[Config, ...]:
        return (ThreadsConfig(128),)

    def recipe(self, problem: Upsample2dBackwardProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        f = problem.forward
        call = KernelCall(
            Program.of(
                "upsample2d_backward/vectorised.cu", "upsample2d_backward_vectorised",
                constants(f) | _outputs(problem),
            ),
            (blocks(ONE_PIXEL.threads_for(f), config.threads), 1, 1),
            (config.threads, 1, 1),
            (Buffer("gradient"), Buffer("y"), pooling.shape(f), *f.steps),
            overlap=True,
        )  # fmt: skip
        return Recipe((call,))


# Predictions for 256 channels of 16 x 16 to 32 x 32, nearest, batch 256, fp16: 168 MB, 39 us.
VECTORISED = Vectorised(
    "vectorised",
    "16 bytes of channels a thread, all outputs of a pixel loaded at once",
    below="per_pixel",
    # 17 million threads of 300 instructions (180 us) against 45 us: a tenth more than the rate of memory.
    predicted_gain=4.0,
)
