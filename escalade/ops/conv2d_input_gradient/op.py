"""`conv2d_input_gradient` as a PyTorch operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import NAMES
from escalade.ops.calling.call import CallPlan, outputs, prepare
from escalade.ops.calling.library import define_planned
from escalade.ops.conv2d.op import conv2d
from escalade.ops.conv2d.problem import Conv2dProblem
from escalade.ops.conv2d_input_gradient.operation import CONV2D_INPUT_GRADIENT
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.rungs.duality import GROUPED_RUNGS, MOST_PHASES
from escalade.ops.shared.images import empty_images_like, layout_of, packer
from escalade.ops.shared.pooling import as_pair

_SCHEMA = (
    "conv2d_input_gradient(Tensor gradient, Tensor weight, SymInt[2] size, Tensor? mask=None, int[2] stride=1, "
    "int[2] padding=0, int[2] dilation=1, int groups=1, bool tf32=False, str? rung=None) -> Tensor"
)


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


class _Call(NamedTuple):
    """Arguments of a call; PyTorch omits trailing arguments that have their defaults."""

    gradient: torch.Tensor
    weight: torch.Tensor
    size: Sequence[int]
    mask: torch.Tensor | None = None
    stride: Sequence[int] = (1, 1)
    padding: Sequence[int] = (0, 0)
    dilation: Sequence[int] = (1, 1)
    groups: int = 1
    tf32: bool = False
    rung: str | None = None


def _check(call: _Call) -> None:
    """Check everything but image and batch sizes, which may be symbolic during tracing."""
    gradient, weight, size, mask = call[:4]
    if gradient.dim() != 4 or weight.dim() != 4 or len(size) != 2:
        raise UnsupportedError(
            f"gradient has {gradient.dim()} dimensions, weight {weight.dim()}, and size {len(size)} numbers; "
            "conv2d_input_gradient takes a gradient [N, K, OH, OW], a weight [K, C/groups, R, S] and the size (H, W)"
        )
    if gradient.dtype not in NAMES:
        raise UnsupportedError(
            f"gradient is {gradient.dtype}; conv2d_input_gradient takes float32, float16 and bfloat16"
        )
    for name, tensor in {"weight": weight, "mask": mask}.items():
        if tensor is not None and (tensor.dtype, tensor.device) != (gradient.dtype, gradient.device):
            raise UnsupportedError(
                f"gradient is {gradient.dtype} on {gradient.device} but {name} {tensor.dtype} on {tensor.device}; "
                "they must be of one dtype and on one device"
            )
    if gradient.shape[1] != weight.shape[0]:
        raise UnsupportedError(
            f"gradient has {gradient.shape[1]} channels, but weight {tuple(weight.shape)} has {weight.shape[0]} filters"
        )
    if call.groups < 1:
        raise UnsupportedError(f"groups={call.groups}: it must be at least 1")
    if call.tf32 and gradient.dtype != torch.float32:
        raise UnsupportedError(
            f"gradient has dtype {gradient.dtype}; tf32=True applies to float32 tensors only"
        )


def _fake(*arguments: Any) -> torch.Tensor:
    call = _Call(*arguments)
    _check(call)
    size = (call.gradient.shape[0], call.weight.shape[1] * call.groups, *call.size)
    return empty_images_like(call.gradient, size)


def _plan(*arguments: Any) -> CallPlan:
    call = _Call(*arguments)
    _check(call)
    gradient, weight, size, mask, stride, padding, dilation, groups, tf32, rung = call
    filters, group_channels, filter_height, filter_width = weight.shape
    forward = Conv2dProblem(
        gradient.shape[0], group_channels * groups, size[0], size[1], filters, filter_height, filter_width,
        (stride[0], stride[-1]), (padding[0], padding[-1]), (dilation[0], dilation[-1]), groups,
        "tf32" if tf32 else NAMES[gradient.dtype], layout_of(gradient),
    )  # fmt: skip
    problem = Conv2dInputGradientProblem(forward, mask=mask is not None)
    _check_sizes(forward, gradient, mask)
    prepared = prepare(CONV2D_INPUT_GRADIENT, problem, gradient.device, rung)
    form = problem if prepared is None else prepared.problem
    return CallPlan(
        prepared,
        outputs(CONV2D_INPUT_GRADIENT, form),
        dict.fromkeys(("gradient", "weight", "mask"), packer(form.layout)),
        finish=None if form.layout == problem.layout else packer(problem.layout),
    )


def _check_sizes(forward: Conv2dProblem, gradient: torch.Tensor, mask: torch.Tensor | None) -> None:
    f = forward
    expected = (f.batch, f.filters, f.output_height, f.output_width)
    if gradient.shape != expected:
        raise UnsupportedError(
            f"gradient has shape {tuple(gradient.shape)}; for an image of {f.height}x{f.width} it must be {expected}"
        )
    image = (f.batch, f.channels, f.height, f.width)
    if mask is not None and mask.shape != image:
        raise UnsupportedError(f"mask has shape {tuple(mask.shape)}; it must have the input's shape, {image}")


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


OPERATOR = define_planned(_SCHEMA, _plan, _fake, setup=_setup, backward=_backward)
