"""`batch_statistics` as a PyTorch operator: on CUDA tensors the chosen rung, on CPU tensors the twin."""

from __future__ import annotations

import torch

from escalade.ops.base.dtypes import dtype_of
from escalade.ops.batch_statistics.operation import BATCH_STATISTICS
from escalade.ops.batch_statistics.problem import BatchStatisticsProblem
from escalade.ops.batch_statistics.reference import empty_output
from escalade.ops.calling.executables import ready
from escalade.ops.calling.library import (
    define,
)
from escalade.ops.shared.images import check_images, laid_out, layout_of


def batch_statistics(x: torch.Tensor, *, rung: str | None = None) -> torch.Tensor:
    """[2, C] in float32: mean and biased variance of each channel of x [N, C, H, W]. The same bits in every run."""
    return OPERATOR(x, rung)


def run_statistics(x: torch.Tensor, rung: str | None = None) -> torch.Tensor:
    check_images("batch_statistics", x)
    batch, channels, height, width = x.shape
    problem = BatchStatisticsProblem(
        batch, channels, height, width, dtype_of("batch_statistics", x), layout_of(x)
    )
    y = empty_output(problem, x.device)
    ready(BATCH_STATISTICS, problem, x.device, rung).run({"x": laid_out(x, problem.layout), "y": y})
    return y


def fake_statistics(x: torch.Tensor, rung: str | None = None) -> torch.Tensor:
    check_images("batch_statistics", x)
    return x.new_empty((2, x.shape[1]), dtype=torch.float32)


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs[0], output)


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    """d mean / dx = 1/n, d variance / dx = 2 (x - mean) / n."""
    x, y = ctx.saved_tensors
    mean, of_mean, of_variance = (each.view(1, -1, 1, 1) for each in (y[0], gradient[0], gradient[1]))
    count = x.shape[0] * x.shape[2] * x.shape[3]
    return ((of_mean + 2 * (x - mean) * of_variance) / count).to(x.dtype), None


OPERATOR = define(
    "batch_statistics(Tensor x, str? rung=None) -> Tensor",
    run_statistics, fake_statistics, setup=_setup, backward=_backward,
)  # fmt: skip
