"""Arguments shared by the conv2d kernels, and sizes for those with few channels or filters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from escalade.device.recipe import Argument, Buffer, Ints
from escalade.ops.conv2d.problem import Conv2dProblem

SHAPES = "common/conv_shape.cuh"


def shape(problem: Conv2dProblem) -> Ints:
    return Ints.of(SHAPES, "ConvShape", problem=problem, channels=problem.channels, filters=problem.filters)


def group_shape(problem: Conv2dProblem) -> Ints:
    """Return the shape with the channels and filters of one group, for kernels with GROUPED."""
    p = problem
    return Ints.of(SHAPES, "ConvShape", problem=p, channels=p.group_channels, filters=p.group_filters)


def shortcut_shape(problem: Conv2dProblem) -> Ints:
    return Ints.of(SHAPES, "ShortcutShape", problem=problem)


def tensors() -> tuple[Argument, ...]:
    """Leading arguments of every kernel that computes the whole operation."""
    return (
        Buffer("x"),
        Buffer("weight"),
        Buffer("bias", optional=True),
        Buffer("residual", optional=True),
        Buffer("y"),
    )


SPLIT_PRODUCTS = 3
"""Tensor-core products per fp32 product: operands are split into two TF32 parts."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of the convolution that a launch computes. Pairs are height and width."""

    dtype: str
    element_bytes: int
    batch: int
    channels: int
    filters: int
    image: tuple[int, int]
    output: tuple[int, int]
    taps: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @classmethod
    def of(cls, p: Conv2dProblem) -> Self:
        return cls(
            p.dtype, p.element_bytes, p.batch, p.channels, p.filters, (p.height, p.width),
            (p.output_height, p.output_width), (p.filter_height, p.filter_width), p.stride, p.padding, p.dilation,
        )  # fmt: skip

    @property
    def products(self) -> int:
        """Tensor-core products per product."""
        return SPLIT_PRODUCTS if self.dtype == "fp32" else 1

    @property
    def parts(self) -> int:
        """Parts per operand."""
        return 2 if self.products > 1 else 1
