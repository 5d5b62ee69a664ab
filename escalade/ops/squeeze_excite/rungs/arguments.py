"""Constants and buffers shared by the kernels of squeeze_excite."""

from __future__ import annotations

from escalade.device.program import Constant
from escalade.device.recipe import Buffer
from escalade.ops.expressions import Expression, fast_functions
from escalade.ops.squeeze_excite.problem import SqueezeExciteProblem

BUFFERS = (
    Buffer("x"), Buffer("weight"), Buffer("bias", optional=True), Buffer("gate_weight"),
    Buffer("gate_bias", optional=True), Buffer("y"),
)  # fmt: skip


def generated(problem: SqueezeExciteProblem) -> dict[str, Constant]:
    """Return the activations of kernels/squeeze_excite/layers.cuh."""
    applied = {
        name: Expression.parse(text).constants(problem.dtype)["EXPRESSION"]
        for name, text in (("ACTIVATION", problem.hidden), ("GATE", problem.gate))
    }
    return {"FAST_FUNCTIONS": fast_functions(problem.dtype), **applied}


def x_pitch(problem: SqueezeExciteProblem) -> int:
    return problem.x_pitch or problem.channels
