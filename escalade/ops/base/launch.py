"""Launches over a one-dimensional grid, the shape of most recipes."""

from __future__ import annotations

from typing import Any

from escalade.device.program import Program
from escalade.device.recipe import Argument, KernelCall, Recipe


def kernel_call(
    program: Program, blocks: int, threads: int, *arguments: Argument, **options: Any
) -> KernelCall:
    """Return a launch that may start while the previous one drains; `options` are fields of `KernelCall`."""
    return KernelCall(program, (blocks, 1, 1), (threads, 1, 1), arguments, overlap=True, **options)


def launch(program: Program, blocks: int, threads: int, *arguments: Argument, **options: Any) -> Recipe:
    """Return the recipe of a single launch."""
    return Recipe((kernel_call(program, blocks, threads, *arguments, **options),))
