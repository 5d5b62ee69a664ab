"""The operation upsample2d_backward, with its ladder."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.shared.images import LAYOUTS
from escalade.ops.upsample2d_backward import reference
from escalade.ops.upsample2d_backward.problem import Upsample2dBackwardProblem
from escalade.ops.upsample2d_backward.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.upsample2d_backward.rungs.per_pixel import PER_PIXEL
from escalade.ops.upsample2d_backward.rungs.rows import ROWS
from escalade.ops.upsample2d_backward.rungs.shared_tile import SHARED_TILE
from escalade.ops.upsample2d_backward.rungs.vectorised import VECTORISED


class Upsample2dBackward(Operation[Upsample2dBackwardProblem]):
    name = "upsample2d_backward"
    problem = Upsample2dBackwardProblem
    in_pytorch = reference
    ladder = Ladder("upsample2d_backward", (PER_PIXEL, SHARED_TILE, ROWS, VECTORISED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def preferred(self, problem: Upsample2dBackwardProblem) -> tuple[str, ...]:
        return ("vectorised", "rows", "per_pixel")


UPSAMPLE2D_BACKWARD = Upsample2dBackward()
