"""Windows of any number of channels: odd sizes on the twin, tiles that follow each other, clusters, registers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade.device.nvrtc import compile_program
from escalade.device.recipe import KernelCall
from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Order
from escalade.ops.conv2d import Conv2d, Conv2dProblem
from escalade.ops.conv2d.hopper_streamed_window import RUNGS, StreamedConfig
from escalade.ops.elements import MOST_SHARED
from tests.support import check

CPU = torch.device("cpu")
CONV2D = Conv2d()
(RUNG,) = RUNGS
LARGE = Conv2dProblem.square(256, 256, 14, 3, batch=32, dtype="fp16", layout="nhwc")


def half(*sizes: Any, **rest: Any) -> Conv2dProblem:
    return Conv2dProblem(*sizes, **{"dtype": "fp16", "layout": "nhwc", **rest})


PROBLEMS = {
    "two_slabs": half(2, 128, 5, 7, 64, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True),
    "pointwise": half(3, 128, 7, 5, 128, 1, 1, bias=True),
    "channels_end_in_a_slab": half(1, 72, 6, 5, 64, 1, 3, padding=(0, 1), bias=True, relu=True),
    "dilation": half(1, 64, 9, 8, 64, 3, 2, (1, 1), (2, 1), (2, 3), residual=True),
    "wide": half(1, 64, 3, 70, 64, 3, 3, padding=(1, 1), residual=True),
    "no_padding": half(1, 128, 8, 9, 64, 5, 5, relu=True),
    "bf16": half(2, 64, 6, 5, 128, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True, dtype="bf16"),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_small_odd_sizes(problem: Conv2dProblem, seed: int) -> None:
    check(CONV2D, RUNG, problem, RUNG.configs(problem)[0], CPU, seed)


def test_every_number_of_splits_and_width(seed: int) -> None:
    problem = half(1, 256, 9, 10, 64, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True)
    configs = RUNG.configs(problem)
    assert {config.as_dict()["splits"] for config in configs} >= {2, 4}
    whole = half(1, 64, 9, 10, 128, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True)
    for case, config in [(problem, c) for c in configs] + [(whole, c) for c in RUNG.configs(whole)]:
        check(CONV2D, RUNG, case, config, CPU, seed)


def test_tiles_follow_each_other_without_a_race(seed: int) -> None:
    """Copies and products as late as allowed, many tiles a block."""
    problem = half(2, 128, 6, 7, 128, 3, 2, padding=(1, 1), bias=True, residual=True)
    inputs = CONV2D.inputs(problem, CPU, seed)
    expected = CONV2D.reference(problem, inputs)
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    config = StreamedConfig(rows=2, columns=4, windows=2, tap_stages=4)
    recipe = RUNG.recipe(problem, config)
    (call,) = recipe.steps
    assert isinstance(call, KernelCall) and call.grid[0] == 2 * 3 * 2 * 2
    y = CONV2D.output(problem, CPU)
    bind(replace(recipe, steps=(replace(call, grid=(3, 1, 1)),)), {**inputs, "y": y}, options=options)()
    assert (y.double() - expected).norm() / expected.norm() < 1e-3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "fp32"}, "fp16"),
        ({"layout": "nchw"}, "layout nhwc"),
        ({"groups": 2}, "groups=1"),
        ({"stride": (2, 2)}, "stride 1"),
        ({"channels": 100}, "multiples of 8"),
        ({"filters": 96}, "multiples of 8"),
        ({"shortcut_channels": 64}, "shortcut"),
        ({"filter_height": 13, "filter_width": 13, "dilation": (8, 8), "padding": (48, 48)}, "windows"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], reason: str) -> None:
    assert RUNG.supports(LARGE) is None
    assert reason in (RUNG.supports(replace(LARGE, **changes)) or "")


@pytest.mark.parametrize("batch", [1, 32])
def test_configs_fit_and_do_not_spill(batch: int) -> None:
    problem = replace(LARGE, batch=batch, bias=True, residual=True, relu=True)
    for config in RUNG.configs(problem)[:3]:
        (call,) = RUNG.recipe(problem, config).steps
        assert isinstance(call, KernelCall) and call.shared_bytes <= MOST_SHARED
        assert compile_program(call.program, "sm_90a").resources.spill_bytes == 0, config
