"""`max_pool2d` as a PyTorch operator: on CUDA tensors the chosen rung, on CPU tensors the same kernel on the twin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.call import Plan
from escalade.ops.calling.library import define_planned
from escalade.ops.max_pool2d.operation import MAX_POOL2D
from escalade.ops.max_pool2d.problem import NOWHERE, MaxPool2dProblem
from escalade.ops.shared import pooling
from escalade.ops.shared.images import check_images, layout_of
from escalade.ops.shared.windowed import empty_pooled

_SCHEMA = "max_pool2d(Tensor x, int[2] kernel, int[2] stride, int[2] padding, bool ceil_mode, str? rung=None) -> Tensor"
_SCHEMA_WITH_PLACES = (
    "max_pool2d_with_places(Tensor x, int[2] kernel, int[2] stride, int[2] padding, bool ceil_mode, "
    "bool behind_relu=False, str? rung=None) -> (Tensor, Tensor)"
)


def max_pool2d(
    x: torch.Tensor,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    *,
    ceil_mode: bool = False,
    rung: str | None = None,
) -> torch.Tensor:
    """The largest value of every window, as `torch.nn.functional.max_pool2d` without dilation.

    The stride is the kernel unless given. NCHW and channels_last inputs are taken as they are (the result
    has x's layout), anything else is copied first. Where x needs a gradient, and is channels_last or has windows
    side by side, the places of the maxima are kept for it. `rung` names one rung of the ladder instead of the chosen
    one.
    """
    kernel = pooling.two(kernel, "kernel")
    stride = kernel if stride is None else pooling.two(stride, "stride")
    padding = pooling.two(padding, "padding")
    if rung is None and _keeps_places(x, kernel, (stride, padding) == (kernel, (0, 0))):
        y: torch.Tensor = _WITH_PLACES(x, kernel, stride, padding, ceil_mode, False, None)[0]
        return y
    return OPERATOR(x, kernel, stride, padding, ceil_mode, rung)


def _keeps_places(x: torch.Tensor, kernel: tuple[int, int], side_by_side: bool) -> bool:
    """Whether a gradient will be asked for that places make cheaper than x: their kernels are fast in NHWC, and for
    windows side by side."""
    if not (torch.is_grad_enabled() and isinstance(x, torch.Tensor) and x.requires_grad):
        return False
    fast = x.dim() == 4 and (side_by_side or layout_of(x) == "nhwc")
    return fast and kernel[0] * kernel[1] <= NOWHERE


def max_pool2d_with_places(
    x: torch.Tensor,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    *,
    ceil_mode: bool = False,
    behind_relu: bool = False,
    rung: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `max_pool2d` gives, and for each output the place of its maximum in the window, row by row, in one byte: the
    first of equals, the last of NaNs.

    With `behind_relu`, where x came out of a ReLU, the place of a maximum that is not positive is 255: by such places
    `max_pool2d_backward` gives the gradient of what went into the ReLU, and so does autograd.
    """
    kernel = pooling.two(kernel, "kernel")
    stride = kernel if stride is None else pooling.two(stride, "stride")
    padding = pooling.two(padding, "padding")
    y, places = _WITH_PLACES(x, kernel, stride, padding, ceil_mode, behind_relu, rung)
    return y, places


def _problem(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    places: bool = False,
    behind_relu: bool = False,
) -> MaxPool2dProblem:
    check_images("max_pool2d", x)
    batch, channels, height, width = x.shape
    return MaxPool2dProblem(
        batch, channels, height, width, (kernel[0], kernel[-1]), (stride[0], stride[-1]),
        (padding[0], padding[-1]), ceil_mode, dtype_of("max_pool2d", x), layout_of(x),
        places=places, behind_relu=behind_relu,
    )  # fmt: skip


def _plan(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    rung: str | None = None,
) -> Plan:
    return pooling.plan(MAX_POOL2D, _problem(x, kernel, stride, padding, ceil_mode), x, rung)


def _fake(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    rung: str | None = None,
) -> torch.Tensor:
    return empty_pooled("max_pool2d", x, kernel, stride, padding, ceil_mode)


def _plan_with_places(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    behind_relu: bool = False,
    rung: str | None = None,
) -> Plan:
    problem = _problem(x, kernel, stride, padding, ceil_mode, True, behind_relu)
    return replace(pooling.plan(MAX_POOL2D, problem, x, rung), results=("y", "places"))


def _fake_with_places(
    x: torch.Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    behind_relu: bool = False,
    rung: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    y = empty_pooled("max_pool2d", x, kernel, stride, padding, ceil_mode)
    return y, torch.empty_like(y, dtype=torch.uint8)


OPERATOR = define_planned(_SCHEMA, _plan, _fake)
_WITH_PLACES = define_planned(_SCHEMA_WITH_PLACES, _plan_with_places, _fake_with_places)
