"""One thread an element, or 16 bytes of channels a thread."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.pad2d.problem import MODES, Pad2dProblem
from escalade.ops.shared import pooling


@dataclass(frozen=True)
class Copies(Rung[Pad2dProblem]):
    wide: bool
    """Whether a thread takes several channels, of images in NHWC."""

    def supports(self, problem: Pad2dProblem) -> str | None:
        if self.wide and problem.layout != "nhwc":
            return f"{self.name} takes layout nhwc, not {problem.layout}"
        if self._threads(problem) >= 2**32 - 2**10:
            return f"{self.name} counts threads in 32 bits; there are too many for {problem.name}"
        return unsupported_pitch(self.name, problem, ("x", "y"))

    def configs(self, problem: Pad2dProblem) -> tuple[Config, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 128, 512))

    def recipe(self, problem: Pad2dProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        p = problem
        constants: dict[str, Constant] = {
            **pooling.constants(p),
            "NHWC": p.layout == "nhwc",
            "MODE": MODES.index(p.mode),
            "VECTOR": self._vector(p),
        }
        call = KernelCall(
            Program.of("pad2d/copies.cu", "pad2d_copies", constants),
            (blocks(self._threads(p), config.threads), 1, 1),
            (config.threads, 1, 1),
            (Buffer("x"), Buffer("y"), pooling.shape(p), p.pads[0], p.pads[2], p.value),
            overlap=True,
        )
        return Recipe((call,))

    def _vector(self, problem: Pad2dProblem) -> int:
        return widest_vector(problem.dtype, problem.channels) if self.wide else 1

    def _threads(self, problem: Pad2dProblem) -> int:
        return problem.output_elements // self._vector(problem)


# Predictions for 64 channels of 112 x 112 with a row and a column more, batch 32, fp16: 104 MB, 25 us.
NAIVE = Copies("naive", "one thread an element of the result", None, None, wide=False)
VECTORISED = Copies(
    "vectorised",
    "16 bytes of channels a thread",
    below="naive",
    # 26 million threads of 80 instructions (72 us) against 25 us at the rate of memory.
    predicted_gain=2.8,
    wide=True,
)
