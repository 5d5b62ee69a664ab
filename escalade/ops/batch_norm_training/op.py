"""`batch_norm_training` as a PyTorch operator: the chosen rung on CUDA tensors, the same on the twin on the CPU's."""

from __future__ import annotations

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.batch_norm.problem import DEFAULT_EPSILON
from escalade.ops.batch_norm_training.operation import BATCH_NORM_TRAINING
from escalade.ops.batch_norm_training.problem import BatchNormTrainingProblem
from escalade.ops.calling.executables import ready
from escalade.ops.calling.library import define, require_alike, without_launch
from escalade.ops.shared.channels import check_numbers, numbers
from escalade.ops.shared.images import check_images, empty_beside, laid_out, layout_of

_NAME = "batch_norm_training"
Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def batch_norm_training(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    momentum: float = 0.1,
    eps: float = DEFAULT_EPSILON,
    relu: bool = False,
    residual: torch.Tensor | None = None,
    *,
    rung: str | None = None,
) -> tuple[torch.Tensor, ...]:
    """y = relu(batch_norm(x) + residual) by the batch's own statistics, residual and relu optional; nothing is changed.

    The further results are in float32 and one a channel: the mean and one over the deviation of x, which
    `batch_norm_backward` takes, and, where running statistics are given, these moved towards the batch's by `momentum`
    (the variance unbiased). Only y has a gradient. Always the same bits. `rung` names one rung of the ladder.
    """
    found = torch.ops.escalade.batch_norm_training(
        x, weight, bias, running_mean, running_var, momentum, eps, relu, residual, rung
    )
    return tuple(found[: 3 if running_mean is None else 5])


def _run(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None = None,
    running_var: torch.Tensor | None = None,
    momentum: float = 0.1,
    eps: float = DEFAULT_EPSILON,
    relu: bool = False,
    residual: torch.Tensor | None = None,
    rung: str | None = None,
    *,
    launch: bool = True,
) -> Results:
    check_images(_NAME, x)
    require_alike(x, {"residual": residual})
    if residual is not None and residual.shape != x.shape:
        raise UnsupportedError(
            f"residual has shape {tuple(residual.shape)}; it must be x's, {tuple(x.shape)}"
        )
    running = {"running_mean": running_mean, "running_var": running_var}
    check_numbers(_NAME, x, {"weight": weight, "bias": bias, **running})
    if (running_mean is None) != (running_var is None):
        raise UnsupportedError("running_mean without running_var, or the reverse: give both, or none")
    if x.shape[0] * x.shape[2] * x.shape[3] < 2:
        raise UnsupportedError(
            f"x has shape {tuple(x.shape)}; training takes more than one value a channel, or it has no variance"
        )
    moves = running_mean is not None
    y = empty_beside(x, x.shape)
    mean, rstd = (x.new_empty(x.shape[1], dtype=torch.float32) for _ in range(2))
    moved = [x.new_empty(x.shape[1] if moves else 0, dtype=torch.float32) for _ in range(2)]
    if not launch:
        return y, mean, rstd, moved[0], moved[1]
    batch, channels, height, width = x.shape
    problem = BatchNormTrainingProblem(
        batch, channels, height, width, relu, residual is not None, dtype_of(_NAME, x), layout_of(x), eps,
        momentum if moves else None,
    )  # fmt: skip
    tensors = {
        "x": laid_out(x, problem.layout), "weight": numbers(x, weight, 1.0), "bias": numbers(x, bias), "y": y,
        "residual": None if residual is None else laid_out(residual, problem.layout), "mean": mean, "rstd": rstd,
    }  # fmt: skip
    if moves:
        tensors |= {
            "running_mean": numbers(x, running_mean), "running_variance": numbers(x, running_var),
            "moved_mean": moved[0], "moved_variance": moved[1],
        }  # fmt: skip
    ready(BATCH_NORM_TRAINING, problem, x.device, rung).run(tensors)
    return y, mean, rstd, moved[0], moved[1]


define(
    "batch_norm_training(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean=None, Tensor? running_var=None, "
    "float momentum=0.1, float eps=1e-05, bool relu=False, Tensor? residual=None, str? rung=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run, without_launch(_run),
)  # fmt: skip
