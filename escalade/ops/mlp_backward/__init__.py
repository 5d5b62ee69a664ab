"""Gradients of a small multilayer perceptron: the operation with its ladder, and the PyTorch operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import DTYPES, NAMES
from escalade.ops.base.ladder import Ladder
from escalade.ops.base.operation import Operation, Reference, in_float64
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import define_planned
from escalade.ops.calling.types import as_list
from escalade.ops.mlp.problem import AUTOENCODER, Layer, check_parameters, parse_layers, spelled
from escalade.ops.mlp_backward import cuda_core, tensor_core
from escalade.ops.mlp_backward.problem import (
    MlpBackwardProblem,
    compute,
    empty_output,
    peer,
    random_inputs,
)
from escalade.ops.shared import rows
from escalade.ops.shared.rows import LAYOUTS

FEW_ROWS = 512
"""Up to this many rows `fused` is preferred: latency bound, 26 us at 64 rows. Unmeasured above; estimates decide."""


class MlpBackwardOperation(Operation[MlpBackwardProblem]):
    name = "mlp_backward"
    problem = MlpBackwardProblem
    in_pytorch = Reference(random_inputs, empty_output, in_float64(compute), peer)
    ladder = Ladder(
        "mlp_backward", (cuda_core.LAYERS, cuda_core.FUSED, tensor_core.TENSOR_CORE, tensor_core.FOLDED)
    )
    problems = (
        *(MlpBackwardProblem(batch, AUTOENCODER) for batch in (64, 512, 8192, 65536, 1048576)),
        MlpBackwardProblem(512, AUTOENCODER, input_gradient=True),
        MlpBackwardProblem(8192, parse_layers("64-128br_128-128br_128-10b")),
    )
    small_problems = tuple(
        MlpBackwardProblem.parse(name)
        for name in (
            "2x8n-8bg_16-4_4n-4bg_4-16_2x8-8b_b6",  # a small spectral autoencoder
            "2x8n-8bg_16-4_4n-4bg_4-16_2x8-8b_b37_dx",  # several tiles, the last not full
            "7-5b_b3_dx",  # odd sizes, and a last layer without an activation
            "3x5n1e-3-7bt_21n-3g_b9_dx",  # odd groups, a norm within the chain, an activation at the end
            "33-70br_70-9_b21",  # more than a warp's share of the weights, and ReLU
            "3x6n-5g_15-4t_4-12b_3x4-9bt_b20_dx",  # layers to merge, of odd groups, both with a bias
            "1-1r_b1",
            "72n-72b_72-136_136-72br_b5_dx",  # more shares than warps of a small block
        )
    )
    dtypes = DTYPES
    layouts = LAYOUTS
    order = ("folded", "tensor_core", "fused", "layers")

    def preferred(self, problem: MlpBackwardProblem) -> tuple[str, ...]:
        return self.order[2:] if problem.batch <= FEW_ROWS else self.order

    def roundings(self, problem: MlpBackwardProblem) -> int:
        return 2 * len(problem.layers)


MLP_BACKWARD = MlpBackwardOperation()


# --- the PyTorch operator


def mlp_backward(
    x: torch.Tensor,
    grad_y: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    layers: str | Sequence[Layer],
    *,
    input_gradient: bool = False,
    rung: str | None = None,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Return the gradient of x (None unless `input_gradient`) and those of the parameters, for y = mlp(x, parameters,
    layers).

    All have the dtype of x, but are computed and summed in fp32; `torch.ops.escalade.mlp_backward` returns the fp32
    results in one tensor. Results are deterministic. `rung` selects a rung of the ladder by name.
    """
    result = OPERATOR(x, grad_y, as_list(parameters), spelled(layers), input_gradient, rung)
    return split(result, x, parameters, input_gradient)


def split(
    result: torch.Tensor, x: torch.Tensor, parameters: Sequence[torch.Tensor], input_gradient: bool
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """Split the operator's result into gradients of x and of each parameter, in their dtype."""
    sizes = [parameter.numel() for parameter in parameters]
    *parts, of_x = result.to(x.dtype).split([*sizes, x.numel() if input_gradient else 0])
    gradients = [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]
    return (of_x.view(x.shape) if input_gradient else None), gradients


def _plan(
    x: torch.Tensor,
    grad_y: torch.Tensor,
    parameters: Sequence[torch.Tensor],
    layers: str,
    input_gradient: bool = False,
    rung: str | None = None,
) -> CallPlan:
    def problem(batch: int) -> MlpBackwardProblem:
        return MlpBackwardProblem(batch, parse_layers(layers), input_gradient, NAMES[x.dtype])

    row = problem(1)  # the number of rows may be symbolic during tracing
    check_parameters(row, layers, x, parameters)
    if grad_y.shape[-1] != row.outputs:
        raise UnsupportedError(
            f"grad_y has rows of {grad_y.shape[-1]}, but {layers} returns rows of {row.outputs}"
        )
    size = row.parameter_elements + (x.numel() if input_gradient else 0)
    return CallPlan(
        MLP_BACKWARD,
        lambda: x.new_empty(size, dtype=torch.float32),
        lambda: problem(batch) if (batch := rows.sizes(x)[0]) else None,
        fill=torch.zero_,
        names=tuple(row.sizes),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    pass


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    raise UnsupportedError("mlp_backward has no gradient: mlp supports first derivatives only")


OPERATOR = define_planned("mlp_backward", _plan, "x: ... I, grad_y: ... O", setup=_setup, backward=_backward)

__all__ = [
    "MLP_BACKWARD",
    "OPERATOR",
    "MlpBackward",
    "MlpBackwardProblem",
    "compute",
    "mlp_backward",
    "split",
]
