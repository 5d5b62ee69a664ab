"""The ladder of add."""

from __future__ import annotations

from typing import Any

from escalade.ops.add import reference
from escalade.ops.add.problem import AddProblem
from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.base.rung import Rung
from escalade.ops.shared import pointwise
from escalade.ops.shared.pointwise import Naive, Vectorised

PROBLEMS = (
    AddProblem(802_816, relu=True),
    AddProblem(6_422_528, relu=True),
    AddProblem(25_690_112, relu=True),
    AddProblem(51_380_224),
    AddProblem(51_380_224, relu=True),
    AddProblem(205_520_896, relu=True),
)
"""ResNet-18: 512 channels 7² at batch 32, 64 channels 56² and 112² at 32, then both at 256."""

SMALL_PROBLEMS = (
    AddProblem(1),
    AddProblem(7, relu=True),
    AddProblem(1000),
    AddProblem(8 * 1024, relu=True),
    AddProblem(9001, relu=True),
)

# Predictions are for 51,380,224 elements in fp16, 308 MB to move: 73 us at 4.24 TB/s. An element a thread has at
# most 4,096 loads of 2 bytes under way on an SM; at 0.7 us each, 132 SMs read 1.5 TB/s: 133 us.
RUNGS: tuple[Rung[Any], ...] = (
    Naive("naive", "an element a thread", None, None),
    Vectorised("vectorised", "16 bytes an access, several under way in a thread", "naive", 1.8),
)


class Add(Operation[AddProblem]):
    name = "add"
    problem = AddProblem
    in_pytorch = reference
    ladder = Ladder("add", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = pointwise.LAYOUTS

    def preferred(self, problem: AddProblem) -> tuple[str, ...]:
        return ("vectorised",)


ADD = Add()
