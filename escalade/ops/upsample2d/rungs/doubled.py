"""Twice as high and wide, between pixels, with weights that are known beforehand."""

from __future__ import annotations

from escalade.device.program import Program
from escalade.device.recipe import KernelCall, Recipe
from escalade.ops.base.grid import blocks
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Config, Rung, ThreadsConfig
from escalade.ops.upsample2d.problem import Upsample2dProblem
from escalade.ops.upsample2d.rungs.arguments import constants, passed
from escalade.ops.upsample2d.rungs.runs import RunsConfig

_OUTPUTS = RunsConfig(4, 4)
"""Outputs of a thread, down and along: OUTPUTS of the kernel."""


class Doubled(Rung[Upsample2dProblem]):
    def supports(self, problem: Upsample2dProblem) -> str | None:
        p = problem
        if p.layout != "nchw":
            return f"{self.name} takes layout nchw, not {p.layout}"
        twice = (2 * p.height, 2 * p.width)
        if p.mode != "bilinear" or p.corners or p.output != twice or p.steps != (0.5, 0.5) or p.width % 2:
            return f"{self.name} makes images of even width twice as high and wide, bilinear without corners"
        if _OUTPUTS.threads_for(p) >= 2**31:
            return f"{self.name} counts threads in 32 bits; there are too many for {p.name}"
        return unsupported_pitch(self.name, p)

    def configs(self, problem: Upsample2dProblem) -> tuple[Config, ...]:
        return tuple(ThreadsConfig(threads) for threads in (256, 128))

    def recipe(self, problem: Upsample2dProblem, config: Config) -> Recipe:
        assert isinstance(config, ThreadsConfig)
        call = KernelCall(
            Program.of("upsample2d/doubled.cu", "upsample2d_doubled", constants(problem)),
            (blocks(_OUTPUTS.threads_for(problem), config.threads), 1, 1),
            (config.threads, 1, 1),
            passed(problem),
            overlap=True,
        )
        return Recipe((call,))


# Predictions for 64 channels of 56 x 56 to 112 x 112, bilinear, batch 32, fp16: 64 MB, 15 us.
DOUBLED = Doubled(
    "doubled",
    "4 x 4 outputs a thread, made of 4 x 4 pixels that are loaded once, with weights that are known beforehand",
    below="runs",
    # a load and 8 instructions an output against 4 and 27
    predicted_gain=2.5,
)
