"""Small multilayer perceptron: the operation with its ladder, and the PyTorch operator."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from escalade.ops.base.dtypes import DTYPES, NAMES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation, Reference
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_planned
from escalade.ops.calling.types import as_list
from escalade.ops.mlp import cuda_core, persistent, tensor_core
from escalade.ops.mlp.problem import (
    AUTOENCODER,
    Layer,
    MlpProblem,
    check_parameters,
    empty_output,
    exact,
    parse_layers,
    peer,
    random_inputs,
    spelled,
)
from escalade.ops.shared import rows
from escalade.ops.shared.rows import LAYOUTS

FEW_ROWS_OF_CLUSTERS = 1024
"""Up to this many rows `clustered_rows` was faster in fp32: 8.0 us against 9.1, but 30 against 18 at 4,096."""
FEW_ROWS = 4096
"""Up to this many rows `shared_rows` was faster: 6 us against 8 at 4,096 rows, but 67 against 37 at 65,536."""


class MlpOperation(Operation[MlpProblem]):
    name = "mlp"
    problem = MlpProblem
    in_pytorch = Reference(random_inputs, empty_output, exact, peer)
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
    problems = (
        *(MlpProblem(batch, AUTOENCODER) for batch in (32, 64, 128, 256, 512, 4096, 65536, 1048576)),
        *(MlpProblem(batch, AUTOENCODER, "error") for batch in (512, 1048576)),
    )
    small_problems = (
        MlpProblem(3, AUTOENCODER),
        MlpProblem(9, parse_layers("13-7br_7-5b")),
        MlpProblem(5, parse_layers("3x10n-6bt_18n-11g_11-30b"), "error"),
        MlpProblem(2, parse_layers("2x40n-40bg_80-16_16n-16bg_16-80_2x40-40b"), "error"),
        MlpProblem(37, parse_layers("24-20bt_20-16_2x8n1e-3-4r")),
        MlpProblem(2, parse_layers("242n-240bg_240-6")),
        MlpProblem(1, parse_layers("1-1b")),
    )
    """Tested on the twin: every activation, norms, both outputs, groups that split and join, odd sizes, one row and
    many, and weights that do not fit into shared memory."""
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


MLP = MlpOperation()


# --- the PyTorch operator


def mlp(
    x: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    layers: Sequence[Layer] | str,
    *,
    error: bool = False,
    rung: str | None = None,
) -> torch.Tensor:
    """Apply a chain of `layers` to the last dimension of x, in one launch.

    `layers` is a sequence of `Layer`, or a string such as `5x64n-64bg_320-32`; `parameters` are their tensors, layer by
    layer: norm weight and bias if it has a norm, weight, and bias if it has one. With `error`, the result is the mean
    squared difference between each row and its reconstruction, in fp32. `rung` selects a rung of the ladder by name.
    """
    return OPERATOR(x, as_list(parameters), spelled(layers), error, rung)


def _plan(
    x: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    layers: str,
    error: bool = False,
    rung: str | None = None,
) -> CallPlan:
    def problem(batch: int) -> MlpProblem:
        return MlpProblem(batch, parse_layers(layers), "error" if error else "y", NAMES[x.dtype])

    row = problem(1)  # the number of rows may be symbolic during tracing
    check_parameters(row, layers, x, parameters)
    return CallPlan(
        MLP,
        lambda: x.new_empty(x.shape[:-1], dtype=torch.float32) if error else rows.empty_like(x, row.outputs),
        lambda: problem(batch) if (batch := rows.sizes(x)[0]) else None,
        names=tuple(row.sizes),
    )


OPERATOR = define_planned("mlp", _plan, "x: ... I", autocast=True)

__all__ = ["MLP", "Layer", "Mlp", "MlpProblem", "mlp"]
