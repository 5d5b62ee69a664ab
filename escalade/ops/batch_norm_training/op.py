"""`batch_norm_training` as a PyTorch operator: the chosen rung on CUDA tensors, the same on the twin on the CPU's."""

from __future__ import annotations

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.batch_norm.problem import DEFAULT_EPSILON
from escalade.ops.batch_norm_training.operation import BATCH_NORM_TRAINING
from escalade.ops.batch_norm_training.problem import BatchNormTrainingProblem
from escalade.ops.calling.call import Plan, launched
from escalade.ops.calling.library import define_planned, require_alike
from escalade.ops.shared.channels import check_numbers, laying_numbers
from escalade.ops.shared.images import check_images, empty_beside, laying, layout_of

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
    found = OPERATOR(x, weight, bias, running_mean, running_var, momentum, eps, relu, residual, rung)
    return tuple(found[: 3 if running_mean is None else 5])


def _fake(
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
    return y, mean, rstd, moved[0], moved[1]


def _plan(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    relu: bool,
    residual: torch.Tensor | None,
    rung: str | None,
) -> Plan:
    results = _fake(x, weight, bias, running_mean, running_var, momentum, eps, relu, residual)
    moves = running_mean is not None
    batch, channels, height, width = x.shape
    problem = BatchNormTrainingProblem(
        batch, channels, height, width, relu, residual is not None, dtype_of(_NAME, x), layout_of(x), eps,
        momentum if moves else None,
    )  # fmt: skip
    images, numbers = laying(problem.layout), laying_numbers(x)
    lay = {"x": images, "residual": images, "weight": laying_numbers(x, 1.0), "bias": numbers}
    if moves:
        lay |= {"running_mean": numbers, "running_variance": numbers}
    names = ("y", "mean", "rstd", "moved_mean", "moved_variance")
    return Plan(
        launched(BATCH_NORM_TRAINING, problem, x.device, rung),
        dict(zip(names, results, strict=True)),
        lay,
        results=names,
        renamed={"running_var": "running_variance"},
    )


OPERATOR = define_planned(
    "batch_norm_training(Tensor x, Tensor? weight, Tensor? bias, Tensor? running_mean=None, Tensor? running_var=None, "
    "float momentum=0.1, float eps=1e-05, bool relu=False, Tensor? residual=None, str? rung=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _plan, _fake,
)  # fmt: skip
