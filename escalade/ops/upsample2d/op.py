"""`upsample2d` as a PyTorch operator: on CUDA tensors the chosen rung, on CPU tensors the same kernel on the twin."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.call import Plan
from escalade.ops.calling.library import define_planned
from escalade.ops.shared import pooling
from escalade.ops.shared.images import check_images, empty_beside, layout_of
from escalade.ops.upsample2d.operation import UPSAMPLE2D
from escalade.ops.upsample2d.problem import Upsample2dProblem

_SCHEMA = "upsample2d(Tensor x, SymInt[2] output, str mode, bool corners, float[2] factors, str? rung=None) -> Tensor"


def upsample2d(
    x: torch.Tensor,
    output: int | Sequence[int],
    mode: str = "nearest",
    *,
    align_corners: bool = False,
    factors: tuple[float, float] = (0.0, 0.0),
    rung: str | None = None,
) -> torch.Tensor:
    """An image at another size, as `torch.nn.functional.interpolate` in the modes that the problem takes.

    `factors` are those of height and width where places follow them instead of the sizes; 0: they follow the sizes.
    NCHW and channels_last inputs are taken as they are (the result has x's layout), anything else is copied first.
    `rung` names one rung of the ladder instead of the chosen one.
    """
    size = pooling.two(output, "output")
    return OPERATOR(x, size, mode, align_corners, factors, rung)


def _plan(
    x: torch.Tensor,
    output: Sequence[int],
    mode: str,
    align_corners: bool,
    factors: Sequence[float],
    rung: str | None = None,
) -> Plan:
    check_images("upsample2d", x)
    batch, channels, height, width = x.shape
    problem = Upsample2dProblem(
        batch, channels, height, width, (output[0], output[-1]), mode, align_corners, (factors[0], factors[-1]),
        dtype_of("upsample2d", x), layout_of(x),
    )  # fmt: skip
    return pooling.plan(UPSAMPLE2D, problem, x, rung)


def _fake(
    x: torch.Tensor,
    output: Sequence[int],
    mode: str,
    align_corners: bool,
    factors: Sequence[float],
    rung: str | None = None,
) -> torch.Tensor:
    check_images("upsample2d", x)
    if min(output) < 1:
        raise UnsupportedError(f"output of {list(output)}: it must be at least 1")
    return empty_beside(x, (x.shape[0], x.shape[1], output[0], output[1]))


OPERATOR = define_planned(_SCHEMA, _plan, _fake)
