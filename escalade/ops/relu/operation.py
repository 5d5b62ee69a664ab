"""The ladder of relu."""

from __future__ import annotations

from typing import Any

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.base.rung import Rung
from escalade.ops.relu import reference
from escalade.ops.relu.problem import ReluProblem
from escalade.ops.shared import pointwise
from escalade.ops.shared.pointwise import Naive, Vectorised

PROBLEMS = (
    ReluProblem(802_816),
    ReluProblem(6_422_528),
    ReluProblem(25_690_112),
    ReluProblem(51_380_224),
    ReluProblem(51_380_224, 6.0),
    ReluProblem(205_520_896),
)
"""ResNet-18: 512 channels 7² at batch 32, 64 channels 56² and 112² at 32, then both at 256."""

SMALL_PROBLEMS = (
    ReluProblem(1),
    ReluProblem(7, 6.0),
    ReluProblem(1000),
    ReluProblem(8 * 1024),
    ReluProblem(9001, 6.0),
    ReluProblem(4099, 0.3),
)

# Predictions are for 51,380,224 elements in fp16, 206 MB to move: 49 us at 4.24 TB/s. An element a thread has at
# most 2,048 loads of 2 bytes under way on an SM; at 0.7 us each, 132 SMs read 0.77 TB/s: 133 us. In fp32, with
# twice the bytes under way, the gain should be 1.3.
RUNGS: tuple[Rung[Any], ...] = (
    Naive("naive", "an element a thread", None, None),
    Vectorised("vectorised", "16 bytes an access, several under way in a thread", "naive", 2.6),
)


class Relu(Operation[ReluProblem]):
    name = "relu"
    problem = ReluProblem
    in_pytorch = reference
    ladder = Ladder("relu", RUNGS)
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = pointwise.LAYOUTS

    def preferred(self, problem: ReluProblem) -> tuple[str, ...]:
        return ("vectorised",)


RELU = Relu()
