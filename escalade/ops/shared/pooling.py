"""Pooling operations and their gradients: the shape that kernels take, and conversion of PyTorch tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from escalade.device.recipe import Ints
from escalade.device.strides import empty
from escalade.errors import UnsupportedError
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import NAMES
from escalade.ops.base.problem import Problem
from escalade.ops.shared.images import (
    ImageProblem,
    empty_images,
    form_of,
)


class Pooling(ImageProblem, Protocol):
    """Images in, images with the same number of channels out."""

    @property
    def output_height(self) -> int: ...
    @property
    def output_width(self) -> int: ...
    @property
    def x_pitch(self) -> int: ...
    @property
    def y_pitch(self) -> int: ...


def shape(problem: Pooling) -> Ints:
    return Ints.of("common/pool_shape.cuh", "PoolShape", problem=problem)


def random_inputs(problem: Pooling, draw: Draw) -> dict[str, torch.Tensor]:
    p = problem
    return {"x": draw.stored(p, p.batch, p.channels, p.height, p.width)}


def empty_output(problem: Pooling, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(p, (p.batch, p.channels, p.output_height, p.output_width), device)


def as_pair(value: int | Sequence[int], what: str) -> tuple[int, int]:
    if type(value) is int:
        return value, value
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    if len(values) == 1:
        values *= 2
    if len(values) != 2 or not all(isinstance(v, int) for v in values):
        raise UnsupportedError(f"{what} is {value!r}: pass one integer, or two (height, width)")
    return values


def divisor(operation: str, override: int | None) -> int:
    """Return PyTorch's `divisor_override` as problems store it: 0 for None."""
    if override is not None and override < 1:
        raise UnsupportedError(f"divisor_override is {override}: {operation} needs at least 1, or None")
    return override or 0


def backward_form(gradient: torch.Tensor, channels_last: bool | None) -> tuple[str, str]:
    """Return the dtype, and the requested layout or the gradient's; one pixel has both layouts, so callers may need to
    say."""
    if channels_last is None:
        return form_of(gradient)
    return NAMES[gradient.dtype], "nhwc" if channels_last else "nchw"


def empty_gradient(gradient: torch.Tensor, size: Sequence[int], channels_last: bool | None) -> torch.Tensor:
    """Return an empty gradient of images of that size; sizes may be symbolic."""
    _, layout = backward_form(gradient, channels_last)
    return empty((*gradient.shape[:2], *size), gradient.dtype, layout, gradient.device)


def check_gradients(
    forward: Any, of_input: Mapping[str, torch.Tensor | None], **of_output: torch.Tensor | None
) -> None:
    """Raise unless tensors have the shape of the images of a problem, and others that of its result."""
    f = forward
    output = (f.batch, getattr(f, "filters", f.channels), f.output_height, f.output_width)
    wanted = [(name, tensor, (f.batch, f.channels, f.height, f.width)) for name, tensor in of_input.items()]
    wanted += [(name, tensor, output) for name, tensor in of_output.items()]
    for name, tensor, size in wanted:
        if tensor is not None and tensor.shape != size:
            raise UnsupportedError(f"{name} has shape {tuple(tensor.shape)}; for {f.name} it must be {size}")


# --- gradients


class PoolingGradient(Problem, Protocol):
    """The gradient of a pooling's input."""

    @property
    def forward(self) -> Pooling: ...


def random_gradient(problem: PoolingGradient, draw: Draw) -> torch.Tensor:
    """Return a random gradient of the pooling's result."""
    f = problem.forward
    size = (f.batch, f.channels, f.output_height, f.output_width)
    return draw.stored(problem, *size)


def empty_input(problem: PoolingGradient, device: torch.device) -> torch.Tensor:
    """Return an empty gradient of the pooling's input."""
    f = problem.forward
    return empty_images(problem, (f.batch, f.channels, f.height, f.width), device)
