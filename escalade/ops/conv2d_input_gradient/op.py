"""`conv2d_input_gradient` as a PyTorch operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from escalade.ops.calling.call import CallPlan
from escalade.ops.calling.library import Pair, SymPair, define_planned
from escalade.ops.conv2d.op import conv2d
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d_input_gradient.operation import CONV2D_INPUT_GRADIENT
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.rungs.duality import GROUPED_RUNGS, MOST_PHASES
from escalade.ops.shared import pooling
from escalade.ops.shared.images import empty_images_like, form_of
from escalade.ops.shared.pooling import as_pair


def conv2d_input_gradient(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    size: Sequence[int],
    mask: torch.Tensor | None = None,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    tf32: bool = False,
    rung: str | None = None,
) -> torch.Tensor:
    """Return the gradient of x in y = conv2d(x, weight) from that of y; `size` is the height and width of x.

    With a mask, the output of a ReLU that produced x, the result is the gradient of the ReLU's input: zero where the
    mask is not positive. Shapes are PyTorch's; the result has the gradient's layout and is deterministic. `tf32` allows
    TF32 products for fp32 tensors; `rung` selects a rung of the ladder by name.
    """
    sizes = tuple(size) if isinstance(size, Sequence) else size
    return OPERATOR(
        gradient, weight, sizes, mask, as_pair(stride, "stride"), as_pair(padding, "padding"),
        as_pair(dilation, "dilation"), groups, tf32, rung,
    )  # fmt: skip


def is_worthwhile(stride: Sequence[int], groups: int) -> bool:
    """Return True if an ungrouped convolution has more than the naive rungs."""
    return groups == 1 and stride[0] * stride[-1] <= MOST_PHASES


def supports_groups(problem: Conv2dInputGradientProblem) -> bool:
    """Return True if a grouped convolution has more than the naive rungs."""
    return any(rung.supports(problem) is None for rung in GROUPED_RUNGS)


def _plan(
    gradient: torch.Tensor,
    weight: torch.Tensor,
    size: SymPair,
    mask: torch.Tensor | None = None,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    groups: int = 1,
    tf32: bool = False,
    rung: str | None = None,
) -> CallPlan:
    filters, group_channels, rows, columns = weight.shape
    image = (gradient.shape[0], group_channels * groups, size[0], size[1])
    settings = (stride, padding, dilation, groups)

    def problem() -> Conv2dInputGradientProblem:
        f = Conv2dProblem(*image, filters, rows, columns, *settings, *form_of(gradient, tf32))
        pooling.check_gradients(f, {"mask": mask}, gradient=gradient)
        return Conv2dInputGradientProblem(f, mask=mask is not None)

    return CallPlan(CONV2D_INPUT_GRADIENT, lambda: empty_images_like(gradient, image), problem)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    gradient, weight, _, mask, *settings = inputs
    ctx.save_for_backward(gradient, weight, mask)
    ctx.settings = tuple(settings[:5])
    ctx.arity = len(inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """Differentiate by the output's gradient (a convolution) and by the weights; the result is linear in both."""
    of_output, weight, mask = ctx.saved_tensors
    stride, padding, dilation, groups, tf32 = ctx.settings
    if mask is not None:
        gradient = torch.ops.aten.threshold_backward(gradient, mask, 0)
    need_output, need_weight = ctx.needs_input_grad[:2]
    results: list[Any] = [None] * ctx.arity
    if need_output:
        results[0] = conv2d(
            gradient, weight, stride=stride, padding=padding, dilation=dilation, groups=groups, tf32=tf32
        )
    if need_weight:
        results[1] = torch.ops.aten.convolution_backward(
            of_output, gradient, weight, None, stride, padding, dilation, False, [0, 0], groups,
            [False, True, False],
        )[1]  # fmt: skip
    return tuple(results)


OPERATOR = define_planned(
    "conv2d_input_gradient",
    _plan,
    "gradient: N K P Q, weight: K C R S, mask: N D H W",
    setup=_setup,
    backward=_backward,
)
