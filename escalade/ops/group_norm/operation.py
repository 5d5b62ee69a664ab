"""The operation group_norm, with its ladder."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.group_norm import reference
from escalade.ops.group_norm.problem import GroupNormProblem
from escalade.ops.group_norm.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.group_norm.rungs.groups import CLUSTERED, IN_REGISTERS, NAIVE, SPLIT
from escalade.ops.shared.images import LAYOUTS


class GroupNorm(Operation[GroupNormProblem]):
    name = "group_norm"
    problem = GroupNormProblem
    in_pytorch = reference
    ladder = Ladder("group_norm", (NAIVE, SPLIT, IN_REGISTERS, CLUSTERED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: GroupNormProblem) -> tuple[str, ...]:
        return ("in_registers", "clustered", "split", "naive")


GROUP_NORM = GroupNorm()
