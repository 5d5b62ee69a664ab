"""What the poolings share: a shape that kernels take, and how tensors of PyTorch reach them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from escalade.device.program import Constant
from escalade.device.recipe import Ints
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import element
from escalade.ops.base.operation import Operation
from escalade.ops.calling.executables import ready
from escalade.ops.calling.library import require_rung
from escalade.ops.shared.images import ImageProblem, empty_images, laid_out, stored_images


class Pooling(ImageProblem, Protocol):
    """Images in, images of as many channels out."""

    @property
    def output_height(self) -> int: ...
    @property
    def output_width(self) -> int: ...
    @property
    def x_pitch(self) -> int: ...
    @property
    def y_pitch(self) -> int: ...


def shape(problem: Pooling) -> Ints:
    """`PoolShape` of kernels/common/pool_shape.cuh."""
    p = problem
    return Ints((p.batch, p.channels, p.height, p.width, p.output_height, p.output_width))


def constants(problem: Pooling) -> dict[str, Constant]:
    """What kernels that take the shape leave open."""
    p = problem
    return {"Element": element(p.dtype), "X_PITCH": p.x_pitch, "Y_PITCH": p.y_pitch}


def random_inputs(problem: Pooling, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn((p.batch, p.channels, p.height, p.width), generator=generator, device=device)
    return {"x": stored_images(p, x)}


def empty_output(problem: Pooling, device: torch.device) -> torch.Tensor:
    p = problem
    return empty_images(p, (p.batch, p.channels, p.output_height, p.output_width), device)


def two(value: int | Sequence[int], what: str) -> list[int]:
    values = list(value) if isinstance(value, Sequence) else [value]
    if len(values) == 1:
        values *= 2
    if len(values) != 2 or not all(isinstance(v, int) for v in values):
        raise UnsupportedError(f"{what} of {value!r}: it is one integer, or two (height, width)")
    return values


def run(operation: Operation[Any], problem: Pooling, x: torch.Tensor, rung: str | None) -> torch.Tensor:
    """The result, in x's layout; a strided x is copied first."""
    y = empty_output(problem, x.device)
    if problem.batch == 0:
        require_rung(operation, rung)
        return y
    ready(operation, problem, x.device, rung).run({"x": laid_out(x, problem.layout), "y": y})
    return y
