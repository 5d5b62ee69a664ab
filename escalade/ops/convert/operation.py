"""The operation convert, with its ladder."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.convert import reference
from escalade.ops.convert.problem import ConvertProblem
from escalade.ops.convert.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.convert.rungs.dealt import DEALT
from escalade.ops.convert.rungs.few_channels import FEW_CHANNELS
from escalade.ops.convert.rungs.naive import NAIVE
from escalade.ops.convert.rungs.rows import ROWS
from escalade.ops.convert.rungs.tiled import TILED
from escalade.ops.shared.images import LAYOUTS


class Convert(Operation[ConvertProblem]):
    name = "convert"
    problem = ConvertProblem
    in_pytorch = reference
    ladder = Ladder("convert", (NAIVE, TILED, FEW_CHANNELS, ROWS, DEALT))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: ConvertProblem) -> tuple[str, ...]:
        return ("dealt", "rows", "few_channels", "tiled", "naive")


CONVERT = Convert()
