"""`cross_entropy` as a PyTorch operator: on CUDA tensors the chosen rung, on CPU tensors its kernels on the twin."""

from __future__ import annotations

from typing import Any

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.executables import aligned, ready
from escalade.ops.calling.library import define, require_rung, require_same_device, without_launch
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
    return torch.ops.escalade.cross_entropy(x, target, reduction, ignore_index, label_smoothing, rung)


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
    found = torch.ops.escalade.cross_entropy_with_gradient(
        x, target, scale, reduction, ignore_index, label_smoothing, rung
    )
    return found[0], found[1]


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
    return aligned(x.movedim(1, -1).contiguous())


def _run(
    x: torch.Tensor, target: torch.Tensor, reduction: str = "mean", ignore_index: int | None = -100,
    label_smoothing: float = 0.0, rung: str | None = None, *, launch: bool = True,
) -> torch.Tensor:  # fmt: skip
    problem = _problem(x, target, reduction, ignore_index, label_smoothing, gradient=False)
    loss = x.new_empty((), dtype=torch.float32)
    if launch:
        _launch(problem, x, target, rung, {"y": loss}, loss)
    return loss


def _run_with_gradient(
    x: torch.Tensor, target: torch.Tensor, scale: torch.Tensor, reduction: str = "mean",
    ignore_index: int | None = -100, label_smoothing: float = 0.0, rung: str | None = None, *, launch: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    problem = _problem(x, target, reduction, ignore_index, label_smoothing, gradient=True)
    check_scale("cross_entropy", x, scale)
    loss = x.new_empty((), dtype=torch.float32)
    gradient = x.movedim(1, -1).new_empty(x.movedim(1, -1).shape)
    if launch:
        _launch(problem, x, target, rung, {"scale": scale, "y": gradient, "loss": loss}, loss)
    return loss, gradient.movedim(-1, 1)


def _launch(
    problem: CrossEntropyProblem,
    x: torch.Tensor,
    target: torch.Tensor,
    rung: str | None,
    tensors: dict[str, torch.Tensor],
    loss: torch.Tensor,
) -> None:
    if problem.batch == 0:
        require_rung(CROSS_ENTROPY, rung)
        loss.fill_(float("nan") if problem.reduction == "mean" else 0.0)
        return
    rows = {"x": _rows(x), "target": aligned(target.contiguous())}
    ready(CROSS_ENTROPY, problem, x.device, rung).run({**rows, **tensors})


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, target, *ctx.settings, _ = inputs
    ctx.save_for_backward(x, target)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    x, target = ctx.saved_tensors
    _, found = torch.ops.escalade.cross_entropy_with_gradient(x, target, gradient, *ctx.settings)
    return found, None, None, None, None, None


define(
    f"cross_entropy(Tensor x, Tensor target, {_SETTINGS}) -> Tensor",
    _run,
    without_launch(_run),
    setup=_setup,
    backward=_backward,
)
_SETUP_NONE, _BACKWARD_NONE = no_second_derivative("cross_entropy")
define(
    f"cross_entropy_with_gradient(Tensor x, Tensor target, Tensor scale, {_SETTINGS}) -> (Tensor, Tensor)",
    _run_with_gradient,
    without_launch(_run_with_gradient),
    setup=_SETUP_NONE,
    backward=_BACKWARD_NONE,
)
