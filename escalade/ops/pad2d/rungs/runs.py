"""Neighbours in a row of the result a thread."""

from __future__ import annotations

from escalade.device.program import Constant, Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.pad2d.problem import MODES, Pad2dProblem
from escalade.ops.shared import pooling


class Runs(Rung[Pad2dProblem]):
    def supports(self, problem: Pad2dProblem) -> str | None:
        if problem.layout != "nchw":
            return f"{self.name} takes layout nchw, not {problem.layout}"
        if self._threads(problem) >= 2**32 - 2**10:
            return f"{self.name} counts threads in 32 bits; there are too many for {problem.name}"
        return unsupported_pitch(self.name, problem)

    def configs(self, problem: Pad2dProblem) -> tuple[Config, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 128, 512))

    def recipe(self, problem: Pad2dProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        p = problem
        constants: dict[str, Constant] = {
            **pooling.constants(p),
            "MODE": MODES.index(p.mode),
            "RUN": self._run(p),
        }
        call = KernelCall(
            Program.of("pad2d/runs.cu", "pad2d_runs", constants),
            (blocks(self._threads(p), config.threads), 1, 1),
            (config.threads, 1, 1),
            (Buffer("x"), Buffer("y"), pooling.shape(p), p.pads[0], p.pads[2], p.value),
            overlap=True,
        )
        return Recipe((call,))

    def _run(self, problem: Pad2dProblem) -> int:
        return widest_vector(problem.dtype, problem.output_width)

    def _threads(self, problem: Pad2dProblem) -> int:
        return problem.output_elements // self._run(problem)


# Predictions for 64 channels of 112 x 112 with a row and a column more, batch 32, fp16: 104 MB, 25 us.
RUNS = Runs(
    "runs",
    "neighbours in a row of the result a thread, stored at once, whose place is found once",
    below="naive",
    # 26 million threads of 80 instructions (72 us) against 15 an element (26 us) where 8 are stored at once.
    predicted_gain=2.5,
)
