"""A thread takes some channels of a whole block of pixels, which it sorts in registers."""

from __future__ import annotations

from escalade.device.program import Program
from escalade.device.recipe import KernelCall, Recipe
from escalade.ops.base.dtypes import ELEMENT_BYTES, widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.pixel_shuffle.problem import PixelShuffleProblem
from escalade.ops.pixel_shuffle.rungs.arguments import constants, passed

MOST_BYTES = 256
"""What a thread sorts at most: half of what its registers hold."""


class Vectorised(Rung[PixelShuffleProblem]):
    def supports(self, problem: PixelShuffleProblem) -> str | None:
        if problem.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {problem.layout}"
        if problem.factor**2 * ELEMENT_BYTES[problem.dtype] > MOST_BYTES:
            return f"{self.name} sorts up to {MOST_BYTES} bytes in registers; a factor of {problem.factor} has more"
        if self._threads(problem) >= 2**31:
            return f"{self.name} counts threads in 32 bits; there are too many for {problem.name}"
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def configs(self, problem: PixelShuffleProblem) -> tuple[Config, ...]:
        return tuple(ThreadsConfig(threads) for threads in (128, 256))

    def recipe(self, problem: PixelShuffleProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        vector = self._vector(problem)
        whole = vector * problem.factor**2
        run = {"VECTOR": vector, "WIDE": widest_vector(problem.dtype, whole)}
        call = KernelCall(
            Program.of("pixel_shuffle/vectorised.cu", "pixel_shuffle_vectorised", constants(problem) | run),
            (blocks(self._threads(problem), config.threads), 1, 1),
            (config.threads, 1, 1),
            passed(problem),
            overlap=True,
        )
        return Recipe((call,))

    def _vector(self, problem: PixelShuffleProblem) -> int:
        """Channels of the larger image: what divides them and leaves a block of pixels in registers."""
        vector = widest_vector(problem.dtype, problem.few_channels)
        while vector > 1 and vector * problem.factor**2 * ELEMENT_BYTES[problem.dtype] > MOST_BYTES:
            vector //= 2
        return vector

    def _threads(self, problem: PixelShuffleProblem) -> int:
        return problem.elements // (self._vector(problem) * problem.factor**2)


# Predictions for 256 channels of 128 x 128 to 64 of 256 x 256, batch 8, fp16: 134 MB, 32 us.
VECTORISED = Vectorised(
    "vectorised",
    "a thread takes some channels of a block of pixels, sorts them in registers and moves 16 bytes at once both ways",
    below="naive",
    # 34 million threads of 80 instructions (93 us), and reads of 2 bytes 8 apart; against 32 us.
    predicted_gain=3.0,
)
