"""Constants and buffers shared by the kernels of squeeze_excite."""

from __future__ import annotations

from escalade.device.program import Constant
from escalade.device.recipe import Buffer
from escalade.ops.base.dtypes import element
from escalade.ops.expressions import Expression, fast_functions
from escalade.ops.squeeze_excite.problem import SqueezeExciteProblem

BUFFERS = (
    Buffer("x"), Buffer("weight"), Buffer("bias", optional=True), Buffer("gate_weight"),
    Buffer("gate_bias", optional=True), Buffer("y"),
)  # fmt: skip


def constants(problem: SqueezeExciteProblem, threads: int) -> dict[str, Constant]:
    """Return the constants of kernels/squeeze_excite/layers.cuh."""
    p = problem
    applied = {
        name: Expression.parse(text).constants(p.dtype)["EXPRESSION"]
        for name, text in (("ACTIVATION", p.hidden), ("GATE", p.gate))
    }
    return {
        "Element": element(p.dtype),
        "CHANNELS": p.channels,
        "SQUEEZED": p.squeezed,
        "PIXELS": p.pixels,
        "HAS_BIAS": p.bias,
        "HAS_GATE_BIAS": p.gate_bias,
        "THREADS": threads,
        "FAST_FUNCTIONS": fast_functions(p.dtype),
        **applied,
    }


def x_pitch(problem: SqueezeExciteProblem) -> int:
    return problem.x_pitch or problem.channels
