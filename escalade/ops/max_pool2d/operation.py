"""The operation max_pool2d, with its ladder."""

from __future__ import annotations

import torch

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation, Tensors
from escalade.ops.max_pool2d import reference
from escalade.ops.max_pool2d.problem import MaxPool2dProblem
from escalade.ops.max_pool2d.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.max_pool2d.rungs.naive import NAIVE
from escalade.ops.max_pool2d.rungs.row_packs import ROW_PACKS
from escalade.ops.max_pool2d.rungs.shared_tile import SHARED_TILE
from escalade.ops.max_pool2d.rungs.vectorised import VECTORISED
from escalade.ops.shared.images import LAYOUTS


class MaxPool2d(Operation[MaxPool2dProblem]):
    name = "max_pool2d"
    problem = MaxPool2dProblem
    in_pytorch = reference
    ladder = Ladder("max_pool2d", (NAIVE, SHARED_TILE, ROW_PACKS, VECTORISED))
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS

    def further_outputs(self, problem: MaxPool2dProblem, device: torch.device) -> dict[str, torch.Tensor]:
        return reference.further_outputs(problem, device)

    def further_references(self, problem: MaxPool2dProblem, inputs: Tensors) -> dict[str, torch.Tensor]:
        return reference.further_references(problem, inputs)

    def preferred(self, problem: MaxPool2dProblem) -> tuple[str, ...]:
        return ("vectorised", "row_packs", "shared_tile", "naive")


MAX_POOL2D = MaxPool2d()
