"""What the poolings share: a shape that kernels take, and how tensors of PyTorch reach them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from escalade.device.recipe import Ints
from escalade.errors import UnsupportedError
from escalade.ops.call import aligned, ready
from escalade.ops.images import DTYPES, MEMORY_FORMAT, STORAGE
from escalade.ops.ladder import Problem
from escalade.ops.operator import require_rung

NAMES = {STORAGE[name]: name for name in DTYPES}


class Pooling(Problem, Protocol):
    """Images in, images of as many channels out."""

    @property
    def channels(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def output_height(self) -> int: ...
    @property
    def output_width(self) -> int: ...


def shape(problem: Pooling) -> Ints:
    """`PoolShape` of kernels/common/pool_shape.cuh."""
    p = problem
    return Ints((p.batch, p.channels, p.height, p.width, p.output_height, p.output_width))


def random_input(problem: Pooling, device: torch.device, seed: int) -> dict[str, torch.Tensor]:
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)
    x = torch.randn((p.batch, p.channels, p.height, p.width), generator=generator, device=device)
    return {"x": x.to(STORAGE[p.dtype]).contiguous(memory_format=MEMORY_FORMAT[p.layout])}


def empty_output(problem: Pooling, device: torch.device) -> torch.Tensor:
    p = problem
    return torch.empty(
        (p.batch, p.channels, p.output_height, p.output_width),
        dtype=STORAGE[p.dtype], device=device, memory_format=MEMORY_FORMAT[p.layout],
    )  # fmt: skip


def two(value: int | Sequence[int], what: str) -> list[int]:
    values = list(value) if isinstance(value, Sequence) else [value]
    if len(values) == 1:
        values *= 2
    if len(values) != 2 or not all(isinstance(v, int) for v in values):
        raise UnsupportedError(f"{what} of {value!r}: it is one integer, or two (height, width)")
    return values


def check_image(operation: str, x: torch.Tensor) -> None:
    if x.dim() != 4:
        raise UnsupportedError(f"x has {x.dim()} dimensions; {operation} takes 4: [N, C, H, W]")
    if x.dtype not in NAMES:
        raise UnsupportedError(f"x is {x.dtype}; {operation} takes float32, float16 and bfloat16")


def layout_of(x: torch.Tensor) -> str:
    """nhwc for channels_last tensors; where the two cannot be told apart (one channel, one pixel), nchw."""
    if x.is_contiguous():
        return "nchw"
    return "nhwc" if x.is_contiguous(memory_format=torch.channels_last) else "nchw"


def run(operation: str, problem: Pooling, x: torch.Tensor, rung: str | None) -> torch.Tensor:
    """The result, in x's layout; a strided x is copied first."""
    y = empty_output(problem, x.device)
    if problem.batch == 0:
        require_rung(operation, rung)
        return y
    laid_out = aligned(x.contiguous(memory_format=MEMORY_FORMAT[problem.layout]))
    ready(operation, problem, x.device, rung).run({"x": laid_out, "y": y})
    return y
