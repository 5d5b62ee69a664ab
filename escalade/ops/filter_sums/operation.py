"""The operation filter_sums, with its ladder."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.filter_sums import reference
from escalade.ops.filter_sums.problem import LAYOUTS, FilterSumsProblem
from escalade.ops.filter_sums.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.filter_sums.rungs.sums import NAIVE, TILED


class FilterSums(Operation[FilterSumsProblem]):
    name = "filter_sums"
    problem = FilterSumsProblem
    in_pytorch = reference
    ladder = Ladder("filter_sums", (NAIVE, TILED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: FilterSumsProblem) -> tuple[str, ...]:
        return ("tiled", "naive")


FILTER_SUMS = FilterSums()
