"""`max_pool2d_backward` as a PyTorch operator: the chosen rung on CUDA tensors, the same on the twin on the CPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import dtype_of
from escalade.ops.calling.call import Plan
from escalade.ops.calling.library import define_planned
from escalade.ops.max_pool2d.problem import MaxPool2dProblem
from escalade.ops.max_pool2d_backward.operation import MAX_POOL2D_BACKWARD
from escalade.ops.max_pool2d_backward.problem import MaxPool2dBackwardProblem
from escalade.ops.max_pool2d_backward.reference import from_places
from escalade.ops.shared import pooling

_NAME = "max_pool2d_backward"
_SCHEMA = (
    f"{_NAME}(Tensor gradient, Tensor? x, Tensor? places, SymInt[2] size, int[2] kernel, int[2] stride, "
    "int[2] padding, bool ceil_mode, bool mask=False, bool? channels_last=None, str? rung=None) -> Tensor"
)


def max_pool2d_backward(
    gradient: torch.Tensor,
    kernel: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    *,
    x: torch.Tensor | None = None,
    places: torch.Tensor | None = None,
    size: int | Sequence[int] | None = None,
    ceil_mode: bool = False,
    mask: bool = False,
    channels_last: bool | None = None,
    rung: str | None = None,
) -> torch.Tensor:
    """The gradient of x in y = max_pool2d(x, kernel, stride, padding), from that of y.

    Either x is given, or `places` with the `size` of x: for each output the place of its maximum in the window, row by
    row, in one byte, and 255 where no gradient goes. The first of equal maxima counts, and the last of NaNs, as in
    PyTorch. With `mask`, where x came out of a ReLU, the result is that of what went into the ReLU: zero where x is not
    positive. The result has the gradient's layout unless `channels_last` says which, and is the same bits every time
    except by the rung `atomics`. `rung` names one rung of the ladder instead of the chosen one.
    """
    kernel = pooling.two(kernel, "kernel")
    stride = kernel if stride is None else pooling.two(stride, "stride")
    if size is None:
        if not isinstance(x, torch.Tensor):
            raise UnsupportedError(f"{_NAME} takes x, or places and the size of x")
        size = x.shape[2:]
    return OPERATOR(
        gradient, x, places, pooling.two(size, "size"), kernel, stride, pooling.two(padding, "padding"), ceil_mode,
        mask, channels_last, rung,
    )  # fmt: skip


def _check(gradient: torch.Tensor, x: torch.Tensor | None, places: torch.Tensor | None, mask: bool) -> None:
    """What can be said without the sizes, which may be symbols while a program is traced."""
    pooling.check_gradient(_NAME, gradient, x=x, places=places)
    if (x is None) == (places is None):
        raise UnsupportedError(f"{_NAME} takes x, or the places of the maxima: one of the two")
    if x is not None and x.dtype != gradient.dtype:
        raise UnsupportedError(f"gradient is {gradient.dtype} but x {x.dtype}; convert them to one dtype")
    if places is not None and places.dtype != torch.uint8:
        raise UnsupportedError(f"places are {places.dtype}; {_NAME} takes one byte for each, torch.uint8")
    if places is not None and mask:
        raise UnsupportedError(
            "a mask and places: the places say themselves where a ReLU has cut a maximum off"
        )


def _plan(
    gradient: torch.Tensor,
    x: torch.Tensor | None,
    places: torch.Tensor | None,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    mask: bool = False,
    channels_last: bool | None = None,
    rung: str | None = None,
) -> Plan:
    _check(gradient, x, places, mask)
    f = MaxPool2dProblem(
        gradient.shape[0], gradient.shape[1], size[0], size[-1], (kernel[0], kernel[-1]), (stride[0], stride[-1]),
        (padding[0], padding[-1]), ceil_mode, dtype_of(_NAME, gradient),
        pooling.backward_layout(gradient, channels_last),
    )  # fmt: skip
    problem = MaxPool2dBackwardProblem(f, mask=mask, stored=places is not None)
    outputs = (f.batch, f.channels, f.output_height, f.output_width)
    tensors = {"gradient": gradient, "x": x, "places": places}
    sizes = {"gradient": outputs, "x": (f.batch, f.channels, f.height, f.width), "places": outputs}
    return pooling.plan_backward(MAX_POOL2D_BACKWARD, problem, tensors, sizes, rung)


def _fake(
    gradient: torch.Tensor,
    x: torch.Tensor | None,
    places: torch.Tensor | None,
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    mask: bool = False,
    channels_last: bool | None = None,
    rung: str | None = None,
) -> torch.Tensor:
    _check(gradient, x, places, mask)
    return pooling.empty_gradient(gradient, size, channels_last)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, x, places, _, *ctx.windows, ctx.mask, _, _ = inputs
    ctx.save_for_backward(x, places)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    """The result is linear in the gradient of y: what is asked of dx is taken from where each maximum comes from."""
    x, places = ctx.saved_tensors
    kernel, stride, padding, ceil_mode = ctx.windows
    if places is None:
        if ctx.mask:
            gradient = torch.ops.aten.threshold_backward(gradient, x, 0)
        _, pixels = torch.ops.aten.max_pool2d_with_indices(x, kernel, stride, padding, [1, 1], ceil_mode)
        counts = None
    else:
        pixels, counts = from_places(places, gradient.shape[3], kernel, stride, padding)
    taken = gradient.flatten(2).gather(2, pixels.flatten(2)).view_as(pixels)
    return (taken if counts is None else torch.where(counts, taken, 0)), *(None,) * 10


OPERATOR = define_planned(_SCHEMA, _plan, _fake, setup=_setup, backward=_backward)
