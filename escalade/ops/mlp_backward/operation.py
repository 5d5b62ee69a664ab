"""The mlp_backward operation and its ladder."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.mlp_backward import reference
from escalade.ops.mlp_backward.problem import MlpBackwardProblem
from escalade.ops.mlp_backward.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.mlp_backward.rungs.fused import FUSED
from escalade.ops.mlp_backward.rungs.layers import LAYERS
from escalade.ops.shared.rows import LAYOUTS


class MlpBackward(Operation[MlpBackwardProblem]):
    name = "mlp_backward"
    problem = MlpBackwardProblem
    in_pytorch = reference
    ladder = Ladder("mlp_backward", (LAYERS, FUSED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: MlpBackwardProblem) -> tuple[str, ...]:
        return ("fused", "layers")

    def roundings(self, problem: MlpBackwardProblem) -> int:
        return 2 * len(problem.layers)


MLP_BACKWARD = MlpBackward()
