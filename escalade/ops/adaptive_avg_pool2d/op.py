"""`adaptive_avg_pool2d` as a PyTorch operator: on CUDA tensors the chosen rung, on CPU tensors the twin's."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from escalade.errors import UnsupportedError
from escalade.ops.adaptive_avg_pool2d.operation import ADAPTIVE_AVG_POOL2D
from escalade.ops.adaptive_avg_pool2d.problem import AdaptiveAvgPool2dProblem
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.call import Plan
from escalade.ops.calling.library import define_planned
from escalade.ops.shared import pooling
from escalade.ops.shared.images import check_images, empty_beside, layout_of


def adaptive_avg_pool2d(
    x: torch.Tensor, output: int | Sequence[int], *, rung: str | None = None
) -> torch.Tensor:
    """Means over a grid of `output` windows that cover the image, as `torch.nn.functional.adaptive_avg_pool2d`.

    NCHW and channels_last inputs are taken as they are (the result has x's layout), anything else is copied
    first. `rung` names one rung of the ladder instead of the chosen one.
    """
    return OPERATOR(x, pooling.two(output, "output"), rung)


def _plan(x: torch.Tensor, output: Sequence[int], rung: str | None = None) -> Plan:
    check_images("adaptive_avg_pool2d", x)
    batch, channels, height, width = x.shape
    problem = AdaptiveAvgPool2dProblem(
        batch,
        channels,
        height,
        width,
        (output[0], output[-1]),
        dtype_of("adaptive_avg_pool2d", x),
        layout_of(x),
    )
    return pooling.plan(ADAPTIVE_AVG_POOL2D, problem, x, rung)


def _fake(x: torch.Tensor, output: Sequence[int], rung: str | None = None) -> torch.Tensor:
    check_images("adaptive_avg_pool2d", x)
    if min(output) < 1:
        raise UnsupportedError(f"output of {list(output)}: it must be at least 1")
    return empty_beside(x, (x.shape[0], x.shape[1], output[0], output[1]))


OPERATOR = define_planned(
    "adaptive_avg_pool2d(Tensor x, int[2] output, str? rung=None) -> Tensor", _plan, _fake
)
