"""The operation layer_norm, with its ladder."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.layer_norm import reference
from escalade.ops.layer_norm.problem import LayerNormProblem
from escalade.ops.layer_norm.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.layer_norm.rungs.columns import COLUMNS
from escalade.ops.layer_norm.rungs.in_registers import IN_REGISTERS
from escalade.ops.layer_norm.rungs.per_row import NAIVE, WARP_PER_ROW
from escalade.ops.shared.rows import LAYOUTS


class LayerNorm(Operation[LayerNormProblem]):
    name = "layer_norm"
    problem = LayerNormProblem
    in_pytorch = reference
    ladder = Ladder("layer_norm", (NAIVE, WARP_PER_ROW, IN_REGISTERS, COLUMNS))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: LayerNormProblem) -> tuple[str, ...]:
        return ("columns", "in_registers", "warp_per_row")


LAYER_NORM = LayerNorm()
