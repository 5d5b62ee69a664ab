"""The depthwise rung: odd sizes on the twin, refusals, and registers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade.device.nvrtc import compile_program
from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Order
from escalade.ops.conv2d import Conv2dOperation, Conv2dProblem
from escalade.ops.conv2d.rungs.depthwise import RUNGS, DepthwiseConfig
from tests.support import Sample, check

CPU = torch.device("cpu")
CONV2D = Conv2dOperation()
(RUNG,) = RUNGS


def depthwise(channels: int, size: int, filter_size: int, **rest: Any) -> Conv2dProblem:
    return Conv2dProblem.square(
        channels, channels, size, filter_size, groups=channels, **{"dtype": "fp16", "layout": "nhwc", **rest}
    )


def oblong(channels: int, *sizes: Any, **rest: Any) -> Conv2dProblem:
    """Height, width, filter height, filter width, then stride, padding and dilation."""
    height, width, *others = sizes
    filter_sizes, others = others[:2], others[2:]
    filters = rest.pop("filters", channels)
    rest = {"dtype": "fp16", "layout": "nhwc", "groups": channels, **rest}
    return Conv2dProblem(2, channels, height, width, filters, *filter_sizes, *others, **rest)


PROBLEMS = {
    "plain": depthwise(16, 9, 3, batch=2, bias=True, residual=True, relu=True),
    "stride_2": depthwise(24, 11, 3, batch=3, stride=2, relu=True),
    "five": depthwise(12, 10, 5, bias=True),
    "five_stride_2": depthwise(8, 13, 5, stride=2, residual=True),
    "seven": depthwise(8, 8, 7, batch=2, bias=True),
    "smaller_than_the_filter": depthwise(16, 3, 7, bias=True),
    "odd_channels": depthwise(13, 7, 3, bias=True, residual=True),
    "one_tap": depthwise(8, 5, 1, stride=2),
    "dilated": oblong(8, 11, 9, 3, 3, (1, 1), (2, 2), (2, 2), relu=True),
    "dilated_and_strided": oblong(4, 12, 15, 3, 3, (2, 2), (3, 3), (3, 3), bias=True),
    "stride_beyond_the_filter": oblong(4, 13, 16, 2, 1, (3, 4), (0, 2)),
    "not_square": oblong(6, 9, 14, 1, 5, (2, 1), (0, 2), bias=True),
    "wide_padding": oblong(8, 3, 2, 3, 3, (1, 1), (4, 3), residual=True),
    "many_channels": depthwise(600, 2, 3),
    "two_filters_a_channel": oblong(6, 7, 9, 3, 3, (1, 1), (1, 1), filters=12, bias=True, residual=True),
    "three_filters_a_channel": oblong(8, 5, 6, 3, 3, (2, 1), (1, 1), filters=24, bias=True),
    "sixteen_filters_a_channel": oblong(3, 5, 6, 3, 3, (1, 1), (1, 1), filters=48, dtype="tf32"),
    "fp32": depthwise(12, 9, 3, bias=True, residual=True, relu=True, dtype="fp32"),
    "tf32": depthwise(8, 6, 3, dtype="tf32"),
    "bf16": depthwise(16, 8, 3, stride=2, bias=True, relu=True, dtype="bf16"),
}


@pytest.mark.share(7)
@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_small_odd_sizes(problem: Conv2dProblem, layout: str, seed: int) -> None:
    problem = replace(problem, layout=layout)
    check(CONV2D, RUNG, problem, RUNG.configs(problem)[0], CPU, seed)


def test_pixels_may_lie_apart(seed: int) -> None:
    problem = oblong(12, 7, 6, 3, 3, (2, 1), (1, 1), filters=24, bias=True, x_pitch=16, y_pitch=40)
    check(CONV2D, RUNG, problem, RUNG.configs(problem)[0], CPU, seed)


@pytest.mark.parametrize("vector", [1, 2, 4, 8])
def test_channels_columns_and_rows_are_shared_out_as_one_likes(vector: int, seed: int) -> None:
    problem = oblong(16, 9, 10, 3, 3, (1, 1), (1, 1), bias=True, residual=True)
    for config in (
        DepthwiseConfig(vector, 4, 9, 16 // vector, 96, 3),
        DepthwiseConfig(vector, 7, 4, 3, 63, 1),  # in steps of 3 vectors; the last CTA has fewer
        DepthwiseConfig(vector, 1, 1, 1, 32, 3),
    ):
        check(CONV2D, RUNG, problem, config, CPU, seed)


@pytest.mark.parametrize("phases", [1, 7])
def test_sums_move_or_stay(phases: int, seed: int) -> None:
    problem = depthwise(8, 9, 7, bias=True)
    config = DepthwiseConfig(2, 4, 5, 4, 96, phases)
    check(CONV2D, RUNG, problem, config, CPU, seed)


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
def test_every_access_is_in_order_and_in_bounds(layout: str, seed: int) -> None:
    problem = oblong(6, 5, 7, 3, 5, (2, 1), (1, 2), bias=True, residual=True, layout=layout)
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    check(CONV2D, RUNG, problem, RUNG.configs(problem)[0], CPU, seed, options)


def test_nan_and_infinity_reach_the_outputs_that_see_them(seed: int) -> None:
    problem = depthwise(8, 9, 3, relu=True)
    inputs = CONV2D.inputs(problem, CPU, seed)
    inputs["weight"] = inputs["weight"].abs() + 0.1
    inputs["x"][0, 2, 4, 4], inputs["x"][0, 5, 0, 8] = torch.nan, torch.inf
    y = CONV2D.output(problem, CPU)
    bind(RUNG.recipe(problem, RUNG.configs(problem)[0]), {**inputs, "y": y})()
    assert y[0, 2, 3:6, 3:6].isnan().all() and y.isnan().sum() == 9
    assert y[0, 5, :2, 7:].isinf().all() and y.isinf().sum() == 4


def test_the_residual_may_be_overwritten(seed: int) -> None:
    problem = depthwise(16, 7, 3, batch=2, bias=True, residual=True, relu=True)
    recipe = RUNG.recipe(problem, RUNG.configs(problem)[0])
    inputs = CONV2D.inputs(problem, CPU, seed)
    y = CONV2D.output(problem, CPU)
    bind(recipe, {**inputs, "y": y})()
    bind(recipe, {**inputs, "y": inputs["residual"]})()
    assert torch.equal(inputs["residual"], y)


LARGE = depthwise(144, 56, 3, batch=256)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"groups": 72}, "as many groups"),
        ({"filter_height": 31, "filter_width": 31}, "fft_fused"),
        ({"dtype": "fp8"}, "not fp8; persistent does"),
        ({"shortcut_channels": 64}, "shortcut"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], reason: str) -> None:
    assert RUNG.supports(LARGE) is None
    assert reason in (RUNG.supports(replace(LARGE, **changes)) or "")


@pytest.mark.share(7)
@pytest.mark.parametrize(
    "problem",
    [
        depthwise(32, 112, 3, batch=256),
        depthwise(96, 112, 3, batch=1, stride=2),
        depthwise(240, 28, 5, batch=256, stride=2, dtype="fp32"),
        depthwise(672, 14, 5, batch=256, dtype="bf16"),
        depthwise(384, 14, 7, batch=64),
        depthwise(96, 56, 7, batch=256, layout="nchw"),
    ],
    ids=lambda problem: f"{problem.name}-{problem.dtype}",
)
def test_the_best_configs_do_not_spill(problem: Conv2dProblem, sample: Sample) -> None:
    problem = replace(problem, bias=True, residual=True, relu=True)
    for config in sample(RUNG.configs(problem)[:2], 1):
        (program,) = RUNG.recipe(problem, config).programs
        assert compile_program(program, "sm_90a").resources.spill_bytes == 0, config
