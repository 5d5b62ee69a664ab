"""First layer of a network: a convolution of few channels with fused normalization, bias, ReLU and max-pooling."""

from __future__ import annotations

from escalade.ops.base.dtypes import MULTIPLIED
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation, Reference
from escalade.ops.stem.problem import (
    PROBLEMS,
    SMALL_PROBLEMS,
    StemProblem,
    empty_output,
    exact,
    peer,
    random_inputs,
)
from escalade.ops.stem.rungs import RUNGS


class Stem(Operation[StemProblem]):
    name = "stem"
    problem = StemProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
    ladder = Ladder("stem", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = MULTIPLIED
    layouts = ("nhwc",)

    def preferred(self, problem: StemProblem) -> tuple[str, ...]:
        return ("streamed", "warpgroup", "pooled", "tensor_core", "separate")


STEM = Stem()

__all__ = ["STEM", "Stem", "StemProblem"]
