"""`cross_entropy` as a PyTorch operator: on CUDA tensors the chosen rung, on CPU tensors its kernels on the twin."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.call import Lay, Plan, launched
from escalade.ops.calling.library import define_planned, require_same_device
from escalade.ops.cross_entropy.operation import CROSS_ENTROPY
from escalade.ops.cross_entropy.problem import CrossEntropyProblem
from escalade.ops.shared.losses import check_scale, no_second_derivative

_SETTINGS = "str reduction='mean', int? ignore_index=-100, float label_smoothing=0.0, str? rung=None"


def cross_entropy(
    x: torch.Tensor,
    target: torch.Tensor,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    *,
    rung: str | None = None,
) -> torch.Tensor:
    """The cross-entropy of logits, [rows][classes] or [images][classes][…], and classes, int64; an fp32 number, and
    always the same bits.

    Rows whose target is `ignore_index` do not count; with None all do, and no launch counts them first. A target that
    is no class makes the loss NaN. The backward pass computes the gradient anew from x, in one pass. `rung` names one
    rung.
    """
    return OPERATOR(x, target, reduction, ignore_index, label_smoothing, rung)


def cross_entropy_with_gradient(
    x: torch.Tensor,
    target: torch.Tensor,
    scale: torch.Tensor,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    *,
    rung: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss, and `scale` times its gradient by x, in one pass: `scale` is an fp32 number on the device, what a loss
    is multiplied by before its gradients are taken."""
    loss, gradient = _WITH_GRADIENT(x, target, scale, reduction, ignore_index, label_smoothing, rung)
    return loss, gradient


def _problem(
    x: torch.Tensor,
    target: torch.Tensor,
    reduction: str,
    ignore_index: int | None,
    label_smoothing: float,
    gradient: bool,
) -> CrossEntropyProblem:
    dtype = dtype_of("cross_entropy", x)
    require_same_device(x, "target", target)
    if x.dim() < 2 or target.shape != x.shape[:1] + x.shape[2:] or target.dtype != torch.int64:
        raise UnsupportedError(
            f"x is {list(x.shape)} and target {list(target.shape)} of {target.dtype}; cross_entropy takes x of "
            "[rows][classes] or [images][classes][…], and a class for each row or pixel, of torch.int64"
        )
    return CrossEntropyProblem(
        target.numel(), x.shape[1], reduction, label_smoothing, ignore_index, gradient, dtype
    )


def _rows(x: torch.Tensor) -> torch.Tensor:
    """The classes of each row or pixel side by side; a view of images in NHWC."""
    return (x if x.dim() == 2 else x.movedim(1, -1)).contiguous()


_LAY: dict[str, Lay] = {"x": _rows, "target": torch.Tensor.contiguous}


def _of_nothing(problem: CrossEntropyProblem, loss: torch.Tensor) -> torch.Tensor:
    """The loss where there are no rows."""
    return loss.fill_(float("nan") if problem.reduction == "mean" else 0.0)


def _fake(
    x: torch.Tensor, target: torch.Tensor, reduction: str = "mean", ignore_index: int | None = -100,
    label_smoothing: float = 0.0, rung: str | None = None,
) -> torch.Tensor:  # fmt: skip
    _problem(x, target, reduction, ignore_index, label_smoothing, gradient=False)
    return x.new_empty((), dtype=torch.float32)


def _plan(
    x: torch.Tensor, target: torch.Tensor, reduction: str, ignore_index: int | None, label_smoothing: float,
    rung: str | None,
) -> Plan:  # fmt: skip
    problem = _problem(x, target, reduction, ignore_index, label_smoothing, gradient=False)
    prepared = launched(CROSS_ENTROPY, problem, x.device, rung)
    finish = None if problem.batch else partial(_of_nothing, problem)
    return Plan(prepared, {"y": torch.empty((), device="meta")}, _LAY, finish=finish)


def _fake_with_gradient(
    x: torch.Tensor, target: torch.Tensor, scale: torch.Tensor, reduction: str = "mean",
    ignore_index: int | None = -100, label_smoothing: float = 0.0, rung: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    _problem(x, target, reduction, ignore_index, label_smoothing, gradient=True)
    check_scale("cross_entropy", x, scale)
    rows = x.movedim(1, -1)
    return x.new_empty((), dtype=torch.float32), rows.new_empty(rows.shape).movedim(-1, 1)


def _plan_with_gradient(
    x: torch.Tensor, target: torch.Tensor, scale: torch.Tensor, reduction: str, ignore_index: int | None,
    label_smoothing: float, rung: str | None,
) -> Plan:  # fmt: skip
    problem = _problem(x, target, reduction, ignore_index, label_smoothing, gradient=True)
    loss, gradient = _fake_with_gradient(x, target, scale, reduction, ignore_index, label_smoothing)
    prepared = launched(CROSS_ENTROPY, problem, x.device, rung)
    finish = None if problem.batch else lambda made: (_of_nothing(problem, made[0]), made[1])
    return Plan(prepared, {"loss": loss, "y": gradient}, _LAY, results=("loss", "y"), finish=finish)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, target, *ctx.settings, _ = inputs
    ctx.save_for_backward(x, target)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    x, target = ctx.saved_tensors
    _, found = _WITH_GRADIENT(x, target, gradient, *ctx.settings, None)
    return found, None, None, None, None, None


OPERATOR = define_planned(
    f"cross_entropy(Tensor x, Tensor target, {_SETTINGS}) -> Tensor",
    _plan,
    _fake,
    setup=_setup,
    backward=_backward,
)
_SETUP_NONE, _BACKWARD_NONE = no_second_derivative("cross_entropy")
_WITH_GRADIENT = define_planned(
    f"cross_entropy_with_gradient(Tensor x, Tensor target, Tensor scale, {_SETTINGS}) -> (Tensor, Tensor)",
    _plan_with_gradient,
    _fake_with_gradient,
    setup=_SETUP_NONE,
    backward=_BACKWARD_NONE,
)
