"""The ladder of mlp, foot to summit."""

from __future__ import annotations

from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation
from escalade.ops.mlp import cuda_core, persistent, reference, tensor_core
from escalade.ops.mlp.problem import MlpProblem, parse_layers
from escalade.ops.shared.rows import LAYOUTS

AUTOENCODER = parse_layers("5x64n-64bg_320-32_32n-32bg_32-320_5x64-64b")
"""The spectral autoencoder of 5 frames of 64 bands."""

PROBLEMS = (
    *(MlpProblem(batch, AUTOENCODER) for batch in (32, 64, 128, 256, 512, 4096, 65536, 1048576)),
    *(MlpProblem(batch, AUTOENCODER, "error") for batch in (512, 1048576)),
)

FEW_ROWS_OF_CLUSTERS = 1024
"""Rows up to which `clustered_rows` was the faster in fp32: 8.0 us against 9.1, and 30 against 18 at 4,096."""
FEW_ROWS = 4096
"""Rows up to which `shared_rows` was the faster: 6 us against 8 at 4,096 rows, 67 against 37 at 65,536."""

SMALL_PROBLEMS = (
    MlpProblem(3, AUTOENCODER),
    MlpProblem(9, parse_layers("13-7br_7-5b")),
    MlpProblem(5, parse_layers("3x10n-6bt_18n-11g_11-30b"), "error"),
    MlpProblem(2, parse_layers("2x40n-40bg_80-16_16n-16bg_16-80_2x40-40b"), "error"),
    MlpProblem(37, parse_layers("24-20bt_20-16_2x8n1e-3-4r")),
    MlpProblem(2, parse_layers("242n-240bg_240-6")),
    MlpProblem(1, parse_layers("1-1b")),
)
"""Small problems that between them have every activation, norm, both outputs, groups that split and join, odd sizes,
one row and many, and weights that do not fit in shared memory."""


class Mlp(Operation[MlpProblem]):
    name = "mlp"
    problem = MlpProblem
    in_pytorch = reference
    ladder = Ladder(
        "mlp",
        (
            cuda_core.LAYERS,
            cuda_core.FUSED,
            cuda_core.WARP_REDUCTIONS,
            cuda_core.VECTORISED,
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
    weights_stay = True  # a whole network, whose parameters are packed when it is made

    def preferred(self, problem: MlpProblem) -> tuple[str, ...]:
        """Rows are shared among warps while that fills the card better; in fp32 a cluster's tensor cores are needed."""
        clustered = (
            ("clustered_rows",) if problem.batch <= FEW_ROWS_OF_CLUSTERS and problem.dtype == "fp32" else ()
        )
        shared = ("shared_rows",) if problem.batch <= FEW_ROWS else ()
        return (*clustered, *shared, "folded", "tensor_core", "persistent", "vectorised", "layers")

    def roundings(self, problem: MlpProblem) -> int:
        return 2 * len(problem.layers)


MLP = Mlp()
