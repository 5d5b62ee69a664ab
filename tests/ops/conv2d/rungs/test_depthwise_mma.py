"""Depthwise convolutions by band matrices on tensor cores: partial tiles and strips, non-finite values, registers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade.device.nvrtc import compile_program
from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Order
from escalade.ops.base.card import H200
from escalade.ops.conv2d import Conv2dOperation, Conv2dProblem
from escalade.ops.conv2d.rungs.depthwise_mma import RUNGS, DepthwiseMmaConfig
from tests.ops.conv2d.rungs.test_depthwise import depthwise, oblong
from tests.support import Sample, check

CPU = torch.device("cpu")
CONV2D = Conv2dOperation()
(RUNG,) = RUNGS
TWO = RUNG.on(replace(H200, multiprocessors=2, architecture=None))
"""On two SMs a CTA loops over several tiles."""


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (
            depthwise(24, 9, 5, batch=2, bias=True, activation="silu(x)"),
            DepthwiseMmaConfig(16, 2, 1, 6, 16, 1),
        ),
        (depthwise(8, 7, 7, batch=5, relu=True, dtype="bf16"), DepthwiseMmaConfig(16, 1, 3, 7, 8, 1)),
        (
            oblong(32, 11, 9, 2, 3, (1, 1), (2, 3), (3, 2), bias=True, x_pitch=40, y_pitch=48),
            DepthwiseMmaConfig(32, 4, 1, 8, 8, 1),
        ),
    ],
    ids=["parts_of_tiles", "whole_images", "apart_and_dilated"],
)
def test_tiles_of_any_shape(problem: Conv2dProblem, config: DepthwiseMmaConfig, seed: int) -> None:
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    check(CONV2D, TWO, problem, config, CPU, seed, options)


def test_nan_and_infinity_reach_the_outputs_that_see_them(seed: int) -> None:
    problem = depthwise(8, 9, 3, relu=True)
    inputs = CONV2D.inputs(problem, CPU, seed)
    inputs["weight"] = inputs["weight"].abs() + 0.1
    inputs["x"][0, 2, 4, 4], inputs["x"][0, 5, 0, 8] = torch.nan, torch.inf
    y = CONV2D.output(problem, CPU)
    bind(RUNG.recipe(problem, RUNG.configs(problem)[0]), {**inputs, "y": y})()
    assert y[0, 2, 3:6, 3:6].isnan().all() and y.isnan().sum() == 9
    assert y[0, 5, :2, 7:].isinf().all() and y.isinf().sum() == 4


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "tf32"}, "takes fp16, bf16, not tf32"),
        ({"stride": (2, 2)}, "stride 1"),
        ({"residual": True}, "support a residual"),
        ({"filter_width": 10}, "9 columns"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], reason: str) -> None:
    problem = depthwise(96, 56, 7, batch=32)
    assert RUNG.supports(problem) is None
    assert reason in (RUNG.supports(replace(problem, **changes)) or "")


@pytest.mark.share(7)
@pytest.mark.parametrize("filter_size", [5, 7])
def test_the_best_configs_do_not_spill(filter_size: int, sample: Sample) -> None:
    problem = depthwise(96, 56, filter_size, batch=32, bias=True, activation="silu(x)")
    for config in sample(RUNG.configs(problem), 1):
        (program,) = RUNG.recipe(problem, config).programs
        assert compile_program(program, "sm_90a").resources.spill_bytes == 0, config
