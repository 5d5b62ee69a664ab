"""Launches whose CTAs are one-dimensional, the shape of most recipes."""

from __future__ import annotations

from typing import Any

from escalade.device.program import Program
from escalade.device.recipe import Argument, KernelCall, Recipe


def kernel_call(
    program: Program, grid: int | tuple[int, ...], threads: int, *arguments: Argument, **options: Any
) -> KernelCall:
    """Return a launch that may start while the previous one drains.

    `grid` has up to three dimensions, the others are 1; `options` are fields of `KernelCall`.
    """
    x, y, z = (*((grid,) if isinstance(grid, int) else grid), 1, 1)[:3]
    return KernelCall(program, (x, y, z), (threads, 1, 1), arguments, overlap=True, **options)


def launch(
    program: Program, grid: int | tuple[int, ...], threads: int, *arguments: Argument, **options: Any
) -> Recipe:
    """Return the recipe of a single launch."""
    return Recipe((kernel_call(program, grid, threads, *arguments, **options),))
