"""`pixel_shuffle` as a PyTorch operator: on CUDA tensors the chosen rung, on CPU tensors the same on the twin."""

from __future__ import annotations

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.executables import ready
from escalade.ops.calling.library import define, require_rung
from escalade.ops.pixel_shuffle.operation import PIXEL_SHUFFLE
from escalade.ops.pixel_shuffle.problem import PixelShuffleProblem
from escalade.ops.pixel_shuffle.reference import empty_output, shuffled
from escalade.ops.shared.images import check_images, empty_beside, laid_out, layout_of


def pixel_shuffle(
    x: torch.Tensor, factor: int, *, down: bool = False, rung: str | None = None
) -> torch.Tensor:
    """Channels as pixels, as `torch.nn.functional.pixel_shuffle`; with `down` as `pixel_unshuffle`.

    NCHW and channels_last inputs are taken as they are (the result has x's layout), anything else is copied first.
    `rung` names one rung of the ladder instead of the chosen one.
    """
    return OPERATOR(x, factor, down, rung)


def _run(x: torch.Tensor, factor: int, down: bool, rung: str | None = None) -> torch.Tensor:
    check_images("pixel_shuffle", x)
    batch, channels, height, width = x.shape
    problem = PixelShuffleProblem(
        batch, channels, height, width, factor, down, dtype_of("pixel_shuffle", x), layout_of(x)
    )
    y = empty_output(problem, x.device)
    if problem.batch == 0:
        require_rung(PIXEL_SHUFFLE, rung)
        return y
    ready(PIXEL_SHUFFLE, problem, x.device, rung).run({"x": laid_out(x, problem.layout), "y": y})
    return y


def _fake(x: torch.Tensor, factor: int, down: bool, rung: str | None = None) -> torch.Tensor:
    check_images("pixel_shuffle", x)
    if factor < 1:
        raise UnsupportedError(f"factor of {factor}: it must be at least 1")
    batch, channels, height, width = x.shape
    if down:
        return empty_beside(x, (batch, channels * factor**2, height // factor, width // factor))
    return empty_beside(x, (batch, channels // factor**2, height * factor, width * factor))


def _setup(ctx, inputs, output):  # type: ignore[no-untyped-def]
    _, ctx.factor, ctx.down, _ = inputs


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    """The other way round, by PyTorch."""
    return shuffled(gradient, ctx.factor, not ctx.down), None, None, None


OPERATOR = define(
    "pixel_shuffle(Tensor x, int factor, bool down, str? rung=None) -> Tensor", _run, _fake, setup=_setup,
    backward=_backward,
)  # fmt: skip
