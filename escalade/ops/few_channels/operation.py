"""The few_channels operation and its ladder, foot to summit."""

from __future__ import annotations

from escalade.ops.base.dtypes import MULTIPLIED
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.few_channels import reference
from escalade.ops.few_channels.problem import FewChannelsProblem
from escalade.ops.few_channels.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.few_channels.rungs import direct, matrix, rows, tensor_core
from escalade.ops.shared.images import LAYOUTS


class FewChannels(Operation[FewChannelsProblem]):
    name = "few_channels"
    problem = FewChannelsProblem
    in_pytorch = reference
    ladder = Ladder("few_channels", (*matrix.RUNGS, *direct.RUNGS, *rows.RUNGS, *tensor_core.RUNGS))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = MULTIPLIED
    layouts = LAYOUTS

    def preferred(self, problem: FewChannelsProblem) -> tuple[str, ...]:
        return ("pooled", "images_a_tile", "split_halves", "rows", "direct", "matrix_unroll")


FEW_CHANNELS = FewChannels()
