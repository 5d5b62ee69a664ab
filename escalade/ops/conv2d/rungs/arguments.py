"""Constants and arguments shared by the conv2d kernels."""

from __future__ import annotations

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
