"""The wgmma rungs: odd sizes on the twin, refusals, and registers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade.device.nvrtc import compile_program
from escalade.device.recipe import KernelCall
from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Order
from escalade.ops.base.accuracy import relative_error
from escalade.ops.base.card import HOPPER_SHARED
from escalade.ops.base.cards import typical_card
from escalade.ops.base.rung import Rung
from escalade.ops.conv2d import Conv2dOperation, Conv2dProblem
from tests.support import Sample, check

CPU = torch.device("cpu")
CONV2D = Conv2dOperation()
RUNGS = [Conv2dOperation.ladder.rung(name) for name in ("tma_wgmma", "producer_consumer")]
each_rung = pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
LARGE = Conv2dProblem.square(128, 128, 28, 3, batch=256, dtype="fp16", layout="nhwc")


def half(*sizes: Any, **rest: Any) -> Conv2dProblem:
    return Conv2dProblem(*sizes, **{"dtype": "fp16", "layout": "nhwc", **rest})


PROBLEMS = {
    "more_slabs_than_stages": half(
        1, 128, 5, 7, 64, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True
    ),
    "fewer_slabs_than_stages": half(3, 64, 7, 5, 128, 1, 1, bias=True),
    "stride_2": half(2, 64, 11, 8, 64, 3, 3, (2, 2), (1, 1), residual=True),
    "pointwise_stride_2": half(2, 64, 7, 9, 64, 1, 1, (2, 2), relu=True),
    "row_filter": half(1, 64, 6, 9, 64, 1, 3, padding=(0, 1)),
    "column_filter": half(1, 64, 9, 6, 64, 5, 1, (1, 2), (1, 0)),
    "wide_padding": half(1, 64, 3, 2, 64, 2, 3, padding=(3, 2), bias=True),
    "bf16": half(2, 64, 6, 5, 128, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True, dtype="bf16"),
    "stride_8": half(1, 64, 19, 25, 64, 3, 2, (8, 5), (1, 0), bias=True),
    "dilation": half(2, 64, 9, 11, 64, 3, 3, padding=(2, 3), dilation=(2, 3), residual=True),
    "channels_end_in_a_slab": half(2, 72, 6, 5, 64, 3, 3, padding=(1, 1)),
    "fewer_channels_than_a_slab": half(1, 8, 9, 7, 64, 3, 3, padding=(1, 1), relu=True),
    "padded_channels": half(2, 67, 5, 6, 64, 3, 1, bias=True),
    "filters_end_in_a_tile": half(2, 64, 7, 5, 140, 1, 1, bias=True, residual=True, relu=True),
    "odd_filters": half(2, 40, 5, 7, 71, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True),
    "one_filter": half(1, 64, 5, 7, 1, 3, 3, bias=True, residual=True),
    "shortcut": half(
        3, 64, 7, 6, 64, 3, 3, padding=(1, 1), bias=True, relu=True, shortcut_channels=136, shortcut_stride=2
    ),
    "shortcut_odd": half(
        1, 5, 7, 6, 67, 3, 3, padding=(1, 1), residual=True, shortcut_channels=8, shortcut_size=(7, 6)
    ),
    "tf32": half(2, 72, 6, 5, 100, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True, dtype="tf32"),
    "tf32_padded": half(2, 35, 6, 5, 67, 2, 2, bias=True, residual=True, dtype="tf32"),
    "tf32_shortcut": half(
        1, 32, 6, 5, 64, 3, 3, padding=(1, 1), dtype="tf32", shortcut_channels=36, shortcut_stride=3
    ),
    "fp8": half(2, 272, 6, 5, 136, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True, dtype="fp8"),
    "fp8_to_half": half(2, 48, 6, 5, 64, 1, 1, residual=True, dtype="fp8", output="fp16"),
    "fp8_odd_filters": half(2, 16, 6, 5, 73, 3, 3, bias=True, residual=True, dtype="fp8", output="fp16"),
    "fp8_odd_bytes": half(2, 16, 6, 5, 73, 3, 3, residual=True, relu=True, dtype="fp8"),
    "fp8_shortcut": half(
        1, 144, 5, 7, 64, 3, 1, padding=(1, 0), bias=True, dtype="fp8", output="fp16", shortcut_channels=160
    ),
}


@pytest.mark.share(7)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_small_odd_sizes(problem: Conv2dProblem, seed: int, sample: Sample) -> None:
    """With one of the rungs, which both launch the same kernel; others every day."""
    for rung in sample(RUNGS, 1):
        check(CONV2D, rung, problem, rung.configs(problem)[0], CPU, seed)


@each_rung
def test_every_tile_is_right_where_the_last_is_not_full(
    rung: Rung[Conv2dProblem], seed: int, sample: Sample
) -> None:
    halves = half(3, 64, 9, 11, 128, 2, 1, bias=True, residual=True, relu=True)
    bytes_ = replace(halves, channels=144, dtype="fp8", output="fp16")
    for problem, count in {halves: 6, bytes_: 4}.items():
        configs = rung.configs(problem)
        assert len(configs) == count
        for config in sample(configs, 2):
            check(CONV2D, rung, problem, config, CPU, seed)


@each_rung
@pytest.mark.parametrize("dtype", ["fp16", "tf32", "fp8"])
def test_stages_are_reused_without_a_race(rung: Rung[Conv2dProblem], dtype: str, seed: int) -> None:
    """Copies and products as late as allowed, in the tile that two warpgroups share."""
    problem = half(1, 128, 4, 5, 128, 3, 1, padding=(1, 0), dtype=dtype, shortcut_channels=128)
    config = next(
        config
        for config in rung.configs(problem)
        if config.as_dict()["pixels"] == 128 == config.as_dict()["filters"]
    )
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    check(CONV2D, rung, problem, config, CPU, seed, options)


@each_rung
def test_tf32_is_as_exact_as_rounding(rung: Rung[Conv2dProblem], seed: int) -> None:
    """With both operands truncated the error would be 7.7e-4, with x alone 4.6e-4."""
    problem = half(1, 64, 12, 12, 64, 3, 3, padding=(1, 1), dtype="tf32")
    inputs = CONV2D.inputs(problem, CPU, seed)
    y = CONV2D.output(problem, CPU)
    bind(rung.recipe(problem, rung.configs(problem)[0]), {**inputs, "y": y})()
    assert 2.5e-4 < relative_error(y, CONV2D.reference(problem, inputs)) < 3.4e-4


@each_rung
def test_nan_and_infinity_reach_the_pixels_that_see_them(rung: Rung[Conv2dProblem], seed: int) -> None:
    problem = half(1, 64, 4, 5, 64, 1, 1, relu=True)
    inputs = CONV2D.inputs(problem, CPU, seed)
    inputs["weight"] = inputs["weight"].abs() + 0.1
    inputs["x"][0, 0, 1, 2], inputs["x"][0, 5, 3, 4] = torch.nan, torch.inf
    y = CONV2D.output(problem, CPU)
    bind(rung.recipe(problem, rung.configs(problem)[0]), {**inputs, "y": y})()
    assert y[0, :, 1, 2].isnan().all() and y.isnan().sum() == 64
    assert y[0, :, 3, 4].isinf().all() and y.isinf().sum() == 64


@each_rung
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "fp32"}, "fp16, bf16, tf32, fp8"),
        ({"layout": "nchw"}, "layout nhwc"),
        ({"groups": 2}, "groups=1"),
        ({"stride": (9, 9)}, "strides up to 8"),
        ({"dtype": "fp8", "channels": 136}, "multiples of 16 channels"),
        ({"padding": (129, 1)}, "corners"),
        ({"filter_width": 131, "width": 200}, "corners"),
        ({"dilation": (65, 1), "height": 200}, "corners"),
        ({"shortcut_channels": 60}, "shortcut's 60"),
        ({"shortcut_channels": 64, "shortcut_stride": 9}, "strides up to 8"),
    ],
)
def test_what_is_refused(rung: Rung[Conv2dProblem], changes: dict[str, Any], reason: str) -> None:
    assert rung.supports(LARGE) is None
    assert reason in (rung.supports(replace(LARGE, **changes)) or "")


@each_rung
def test_it_is_for_hopper_alone(rung: Rung[Conv2dProblem]) -> None:
    assert (
        rung.on(typical_card("sm_90a")).refusal(LARGE) is None
        and rung.on(typical_card(None)).refusal(LARGE) is None
    )
    assert "sm_90a" in (rung.on(typical_card("sm_100")).refusal(LARGE) or "")


@each_rung
def test_the_blocks_of_a_multiprocessor_fit(rung: Rung[Conv2dProblem]) -> None:
    for config in rung.configs(LARGE):
        (call,) = rung.recipe(LARGE, config).steps
        assert isinstance(call, KernelCall)
        assert (call.shared_bytes + 1024) * config.as_dict()["blocks_per_sm"] <= HOPPER_SHARED + 1024


@pytest.mark.share(7)
@each_rung
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "tf32", "fp8"])
def test_no_config_spills(rung: Rung[Conv2dProblem], dtype: str, sample: Sample) -> None:
    problem = replace(
        LARGE, dtype=dtype, bias=True, residual=True, relu=True, shortcut_channels=64, filters=129
    )
    for config in sample(rung.configs(problem), 1):
        program = rung.recipe(problem, config).programs[-1]
        assert compile_program(program, "sm_90a").resources.spill_bytes == 0, config
