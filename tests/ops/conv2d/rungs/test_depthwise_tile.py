"""Depthwise convolutions over windows by TMA: partial tiles, several tiles per CTA, registers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade.device.nvrtc import compile_program
from escalade.device.run import TwinOptions
from escalade.device.twin import Order
from escalade.ops.base.card import H200
from escalade.ops.conv2d import Conv2dOperation, Conv2dProblem
from escalade.ops.conv2d.rungs.depthwise_tile import RUNGS, TileConfig
from tests.ops.conv2d.rungs.test_depthwise import depthwise, oblong
from tests.support import Sample, check

CPU = torch.device("cpu")
CONV2D = Conv2dOperation()
(RUNG,) = RUNGS

PROBLEMS = {
    "whole_images": depthwise(16, 5, 5, batch=3, bias=True, activation="silu(x)"),
    "dilated_and_strided": oblong(8, 12, 15, 3, 3, (2, 2), (3, 3), (3, 3), bias=True, relu=True),
    "fp32": depthwise(12, 9, 3, bias=True, residual=True, relu=True, dtype="fp32"),
    "apart": oblong(8, 7, 6, 3, 2, (2, 1), (1, 1), bias=True, dtype="bf16", x_pitch=16, y_pitch=40),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_small_odd_sizes(problem: Conv2dProblem, seed: int) -> None:
    check(CONV2D, RUNG, problem, RUNG.configs(problem)[0], CPU, seed)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_block_walks_over_tiles_while_the_next_windows_come(rows: int, seed: int) -> None:
    """On a card with few SMs; tiles extend beyond the image, and channels beyond the tensor."""
    problem = depthwise(24, 9, 3, batch=2, bias=True, residual=True)
    few = RUNG.on(replace(H200, multiprocessors=2, architecture=None))
    config = TileConfig(4, 4, rows, 16, 1, 4, 8, 2, 1)
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    check(CONV2D, few, problem, config, CPU, seed, options)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"channels": 148, "filters": 148, "groups": 148}, "multiples of 8 channels"),
        ({"filters": 288}, "one filter per channel"),
        ({"layout": "nchw"}, "layout nhwc"),
        ({"padding": (300, 300), "filter_height": 600, "filter_width": 600}, "do not fit"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], reason: str) -> None:
    problem = depthwise(144, 56, 3, batch=32)
    assert RUNG.supports(problem) is None
    assert reason in (RUNG.supports(replace(problem, **changes)) or "")


@pytest.mark.share(7)
@pytest.mark.parametrize(
    "problem",
    [
        depthwise(144, 56, 3, batch=32),
        depthwise(96, 112, 3, batch=1, stride=2, dtype="tf32"),
        depthwise(672, 14, 5, batch=32, dtype="bf16"),
        depthwise(96, 56, 7, batch=32),
    ],
    ids=lambda problem: f"{problem.name}-{problem.dtype}",
)
def test_the_best_configs_do_not_spill(problem: Conv2dProblem, sample: Sample) -> None:
    problem = replace(problem, bias=True, residual=True, activation="silu(x)")
    for config in sample(RUNG.configs(problem), 1):
        (program,) = RUNG.recipe(problem, config).programs
        assert compile_program(program, "sm_90a").resources.spill_bytes == 0, config
