"""`conv2d` as a PyTorch operator."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from escalade.errors import UnsupportedError
from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import Pair, define_planned
from escalade.ops.conv2d.operation import CONV2D
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.shared.images import empty_images_like, form_of, shape_of
from escalade.ops.shared.pooling import as_pair


def _plan(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    groups: int = 1,
    relu: bool = False,
    tf32: bool = False,
    rung: str | None = None,
) -> CallPlan:
    filters, _, rows, columns = weight.shape
    settings = (stride, padding, dilation, groups)
    given = (bias is not None, residual is not None, relu)

    def result() -> torch.Tensor:
        steps = zip(x.shape[2:], (rows, columns), *settings[:3], strict=True)
        size = [
            (pixels + 2 * pad - gap * (taps - 1) - 1) // step + 1 for pixels, taps, step, pad, gap in steps
        ]
        return empty_images_like(x, (x.shape[0], filters, *size))

    def problem() -> Conv2dProblem:
        made = Conv2dProblem(*shape_of(x), filters, rows, columns, *settings, *form_of(x, tf32), *given)
        expected = (made.batch, filters, made.output_height, made.output_width)
        if residual is not None and residual.shape != expected:
            raise UnsupportedError(
                f"residual has shape {tuple(residual.shape)}; it must have the output's shape, {expected}"
            )
        return made

    return CallPlan(CONV2D, result, problem)


def conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    relu: bool = False,
    tf32: bool = False,
    rung: str | None = None,
) -> torch.Tensor:
    """Return relu(conv2d(x, weight) + bias + residual); bias, residual and relu are optional.

    Shapes are PyTorch's. NCHW and channels_last inputs are used in place (the result has x's layout), others are
    copied first. `tf32` allows TF32 products for fp32 tensors; `rung` selects a rung of the ladder by name. CPU
    tensors run the same kernel on the twin.
    """
    return OPERATOR(
        x, weight, bias, residual, as_pair(stride, "stride"), as_pair(padding, "padding"),
        as_pair(dilation, "dilation"), groups, relu, tf32, rung,
    )  # fmt: skip


OPERATOR = define_planned(
    "conv2d", _plan, "x: N C H W, weight: K C/groups R S, bias: K, residual: N K P Q", autocast=True
)
