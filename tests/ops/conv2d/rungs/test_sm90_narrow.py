"""Few filters: columns of several taps, odd sizes and result strides on the twin, consecutive tiles."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from escalade.device.nvrtc import compile_program
from escalade.device.recipe import KernelCall, Recipe
from escalade.ops.base.rung import Config
from escalade.ops.choose.choice import choose
from escalade.ops.conv2d import Conv2dOperation, Conv2dProblem
from escalade.ops.conv2d.rungs.sm90_narrow import RUNGS, Narrow, NarrowConfig
from tests.support import check

CPU = torch.device("cpu")
CONV2D = Conv2dOperation()
(RUNG,) = RUNGS


def half(*sizes: Any, **rest: Any) -> Conv2dProblem:
    return Conv2dProblem(*sizes, **{"dtype": "fp16", "layout": "nhwc", **rest})


@dataclass(frozen=True)
class OneBlock(Narrow):
    """So that every warpgroup has several tiles."""

    def recipe(self, problem: Conv2dProblem, config: Config) -> Recipe:
        assert isinstance(config, NarrowConfig)
        recipe = super().recipe(problem, config)
        *before, call = recipe.steps
        assert isinstance(call, KernelCall)
        return replace(recipe, steps=(*before, replace(call, grid=(config.parts, 1, 1))))


PROBLEMS = {
    "part_of_a_buffer": (
        half(2, 128, 9, 7, 32, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True, y_pitch=48),
        NarrowConfig(4, 7, 2, 2),
    ),
    "odd_filters_in_parts": (
        half(1, 72, 6, 9, 21, 3, 3, padding=(1, 1), bias=True),
        NarrowConfig(3, 5, 3, 3, parts=2),
    ),
    "dilation": (
        half(1, 16, 9, 12, 10, 3, 5, padding=(2, 4), dilation=(2, 2), residual=True, x_pitch=24),
        NarrowConfig(5, 12, 2, 2),
    ),
    "bf16": (half(2, 64, 5, 6, 36, 1, 2, dtype="bf16", relu=True), NarrowConfig(5, 5, 2, 2)),
    "tf32": (half(1, 36, 6, 5, 12, 3, 3, dtype="tf32", bias=True, residual=True), NarrowConfig(4, 3, 2, 2)),
}


@pytest.mark.parametrize(("problem", "config"), PROBLEMS.values(), ids=PROBLEMS)
def test_small_odd_sizes(problem: Conv2dProblem, config: NarrowConfig, seed: int) -> None:
    assert RUNG.supports(problem) is None
    rung = OneBlock(RUNG.name, RUNG.summary, RUNG.below, RUNG.predicted_gain)
    check(CONV2D, rung, problem, config, CPU, seed)


def test_sums_leave_registers_to_the_rest() -> None:
    """Two blocks of 144 columns would spill, so they are not offered. Nor are fragments indexed in local memory."""
    problem = Conv2dProblem.square(64, 48, 64, 3, batch=16, dtype="fp16", layout="nhwc", bias=True)
    (program,) = RUNG.recipe(problem, RUNG.configs(problem)[0]).programs
    resources = compile_program(program, "sm_90a").resources
    assert resources.spill_bytes == resources.stack_bytes == 0


@pytest.mark.parametrize(("filters", "taps", "taken"), [(32, 3, True), (64, 3, False), (32, 1, False)])
def test_few_filters_of_several_taps_are_taken(filters: int, taps: int, taken: bool) -> None:
    problem = Conv2dProblem.square(128, filters, 28, taps, batch=32, dtype="fp16", layout="nhwc")
    assert (choose(CONV2D, problem, CPU).rung.name == RUNG.name) == taken
