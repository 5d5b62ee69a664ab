"""How upsample2d reaches a kernel: the constants and arguments that its rungs share."""

from __future__ import annotations

from escalade.device.program import Constant
from escalade.device.recipe import Argument, Buffer
from escalade.ops.shared import pooling
from escalade.ops.upsample2d.problem import Upsample2dProblem


def constants(problem: Upsample2dProblem) -> dict[str, Constant]:
    return {
        **pooling.constants(problem),
        "TAPS": problem.taps,
        "EXACT": problem.mode == "nearest_exact",
        "CORNERS": problem.corners,
    }


def passed(problem: Upsample2dProblem) -> tuple[Argument, ...]:
    return (Buffer("x"), Buffer("y"), pooling.shape(problem), *problem.steps)
