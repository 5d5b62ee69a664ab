"""Pooling operations and their gradients: the shape that kernels take, and conversion of PyTorch tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from escalade.device.recipe import Ints
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import NAMES
from escalade.ops.base.operation import Operation
from escalade.ops.base.problem import Problem
from escalade.ops.calling.call import CallPlan, outputs, prepare
from escalade.ops.shared.images import (
    MEMORY_FORMAT,
    ImageProblem,
    empty_images,
    layout_of,
    packer,
    stored_images,
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


def random_inputs(problem: Pooling, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn((p.batch, p.channels, p.height, p.width), generator=generator, device=device)
    return {"x": stored_images(p, x)}


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


def plan(operation: Operation[Any], problem: Pooling, x: torch.Tensor, rung: str | None) -> CallPlan:
    """Plan a result in x's layout; a strided x is copied first."""
    prepared = prepare(operation, problem, x.device, rung)
    return CallPlan(prepared, outputs(operation, problem), {"x": packer(problem.layout)})


# --- gradients


class PoolingGradient(Problem, Protocol):
    """The gradient of a pooling's input."""

    @property
    def forward(self) -> Pooling: ...


def random_gradient(problem: PoolingGradient, device: torch.device, seed: int) -> torch.Tensor:
    """Return a random gradient of the pooling's result."""
    f = problem.forward
    generator = torch.Generator(device=device).manual_seed(seed)
    size = (f.batch, f.channels, f.output_height, f.output_width)
    return stored_images(problem, torch.randn(size, generator=generator, device=device))


def empty_input(problem: PoolingGradient, device: torch.device) -> torch.Tensor:
    """Return an empty gradient of the pooling's input."""
    f = problem.forward
    return empty_images(problem, (f.batch, f.channels, f.height, f.width), device)


def backward_layout(gradient: torch.Tensor, channels_last: bool | None) -> str:
    """Return the requested layout, or the gradient's; one pixel has both layouts, so callers may need to say."""
    if channels_last is None:
        return layout_of(gradient)
    return "nhwc" if channels_last else "nchw"


def check_gradient(operation: str, gradient: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Check what does not depend on sizes, which may be symbolic during tracing."""
    if gradient.dim() != 4:
        raise UnsupportedError(
            f"gradient has {gradient.dim()} dimensions; {operation} needs 4: [N, C, OH, OW]"
        )
    if gradient.dtype not in NAMES:
        raise UnsupportedError(
            f"gradient is {gradient.dtype}; {operation} supports float32, float16 and bfloat16"
        )
    for name, tensor in others.items():
        if tensor is not None and tensor.device != gradient.device:
            raise UnsupportedError(
                f"gradient is on {gradient.device} but {name} is on {tensor.device}; move them to one device"
            )


def empty_gradient(gradient: torch.Tensor, size: Sequence[int], channels_last: bool | None) -> torch.Tensor:
    """Return an empty gradient of images of that size, for fakes."""
    memory_format = MEMORY_FORMAT[backward_layout(gradient, channels_last)]
    return torch.empty(
        (*gradient.shape[:2], *size),
        dtype=gradient.dtype, device=gradient.device, memory_format=memory_format,
    )  # fmt: skip


def plan_backward(
    operation: Operation[Any],
    problem: Problem,
    tensors: Mapping[str, torch.Tensor | None],
    sizes: Mapping[str, tuple[int, ...]],
    rung: str | None,
) -> CallPlan:
    """Plan the gradient of x from tensors of these sizes; strided ones are copied first."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != sizes[name]:
            raise UnsupportedError(f"{name} has shape {tuple(tensor.shape)}; it must be {sizes[name]}")
    (device,) = {tensor.device for tensor in tensors.values() if tensor is not None}
    prepared = prepare(operation, problem, device, rung)
    return CallPlan(prepared, outputs(operation, problem), dict.fromkeys(tensors, packer(problem.layout)))
