"""The mlp operation and its ladder."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.mlp import reference
from escalade.ops.mlp.problem import MlpProblem
from escalade.ops.mlp.problems import PROBLEMS, SMALL_PROBLEMS
from escalade.ops.mlp.rungs import fused, layers, persistent, tensor_core
from escalade.ops.shared.rows import LAYOUTS

FEW_ROWS_OF_CLUSTERS = 1024
"""Up to this many rows `clustered_rows` was faster in fp32: 8.0 us against 9.1, but 30 against 18 at 4,096."""
FEW_ROWS = 4096
"""Up to this many rows `shared_rows` was faster: 6 us against 8 at 4,096 rows, but 67 against 37 at 65,536."""


class Mlp(Operation[MlpProblem]):
    name = "mlp"
    problem = MlpProblem
    in_pytorch = reference
    ladder = Ladder(
        "mlp",
        (
            layers.LAYERS,
            fused.FUSED,
            fused.WARP_REDUCTIONS,
            fused.VECTORISED,
            persistent.PERSISTENT,
            tensor_core.TENSOR_CORE,
            tensor_core.FOLDED,
            tensor_core.SHARED_ROWS,
            tensor_core.CLUSTERED_ROWS,
        ),
    )
    problems = PROBLEMS
    small_problems = SMALL_PROBLEMS
    dtypes = DTYPES
    layouts = LAYOUTS
    weights_are_constant = True  # a whole network: parameters are packed once

    def preferred(self, problem: MlpProblem) -> tuple[str, ...]:
        """Small batches split rows among warps to fill the card; in fp32 that needs the tensor cores of a cluster."""
        clustered = (
            ("clustered_rows",) if problem.batch <= FEW_ROWS_OF_CLUSTERS and problem.dtype == "fp32" else ()
        )
        shared = ("shared_rows",) if problem.batch <= FEW_ROWS else ()
        return (*clustered, *shared, "folded", "tensor_core", "persistent", "vectorised", "layers")

    def roundings(self, problem: MlpProblem) -> int:
        return 2 * len(problem.layers)


MLP = Mlp()
