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
from escalade.ops.elements import CLUSTERS, MOST_SHARED
from tests.support import Sample, check

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
    "shortcut": half(2, 64, 5, 7, 64, 3, 3, padding=(1, 1), bias=True, relu=True, shortcut_channels=72),
    "strided_shortcut": half(
        1, 64, 5, 6, 128, 1, 3, padding=(0, 1), residual=True,
        shortcut_channels=8, shortcut_stride=2, shortcut_size=(10, 11),
    ),
    "bf16": half(2, 64, 6, 5, 128, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True, dtype="bf16"),
}  # fmt: skip


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_small_odd_sizes(problem: Conv2dProblem, seed: int) -> None:
    check(CONV2D, RUNG, problem, RUNG.configs(problem)[0], CPU, seed)


def test_every_number_of_splits_and_width(seed: int) -> None:
    problem = half(1, 256, 9, 10, 64, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True)
    first, *_, last = (config for config in RUNG.configs(problem) if isinstance(config, StreamedConfig))
    assert first.splits == 4 and (first.rows, first.columns) != (last.rows, last.columns)
    cases = [(problem, replace(config, splits=splits)) for config in (first, last) for splits in (1, 2, 3, 4)]
    whole = half(1, 64, 9, 10, 128, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True)
    cases += [(whole, config) for config in RUNG.configs(whole) if isinstance(config, StreamedConfig)]
    for case, config in cases:
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


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("columns", [4, 7])
def test_shortcuts_in_every_kind_of_tile(splits: int, columns: int, seed: int) -> None:
    """Windows and the shortcut's pixels, which fill less, in the same stages; tiles that end in the image."""
    problem = half(
        2, 128, 5, 7, 64, 3, 2, padding=(1, 1), bias=True, relu=True,
        shortcut_channels=136, shortcut_stride=3, shortcut_size=(15, 22),
    )  # fmt: skip
    assert (problem.output_height, problem.output_width) == (5, 8)
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    config = StreamedConfig(rows=2, columns=columns, windows=3, tap_stages=4, splits=splits)
    check(CONV2D, RUNG, problem, config, CPU, seed, options)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "fp32"}, "fp16"),
        ({"layout": "nchw"}, "layout nhwc"),
        ({"groups": 2}, "groups=1"),
        ({"stride": (2, 2)}, "stride 1"),
        ({"channels": 100}, "multiples of 8"),
        ({"filters": 96}, "multiples of 64"),
        ({"shortcut_channels": 36}, "8 shortcut channels"),
        ({"height": 1, "width": 1, "batch": 2**30}, "32 bits"),
        ({"filter_height": 13, "filter_width": 13, "dilation": (8, 8), "padding": (48, 48)}, "windows"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], reason: str) -> None:
    assert RUNG.supports(LARGE) is None
    assert reason in (RUNG.supports(replace(LARGE, **changes)) or "")


@pytest.mark.parametrize(
    ("name", "first", "measured"),
    [
        ("256to256_14_k3s1_b1_bias+res+relu", (2, 14, 4), 5.44),
        ("128to128_28_k3s1_b8_bias+res+relu", (7, 14, 1), 6.43),
        ("256to256_14_k3s1_b8_bias+res+relu", (7, 14, 2), 8.03),
        ("512to512_7_k3s1_b8_bias+res+relu", (7, 7, 2), 9.84),
        ("256to256_14_k3s1_b32_bias+res+relu", (14, 14, 1), 14.52),
        ("512to512_7_k3s1_b256_bias+res+relu", (7, 7, 1), 170.5),
        ("64to64_56_k3s1_b256_bias+relu", (4, 56, 1), 91.9),
    ],
)
def test_the_first_config_is_what_was_fastest_on_an_h200(
    name: str, first: tuple[int, int, int], measured: float
) -> None:
    problem = Conv2dProblem.parse(name, "fp16", "nhwc")
    chosen = RUNG.configs(problem)[0]
    assert isinstance(chosen, StreamedConfig) and (chosen.rows, chosen.columns, chosen.splits) == first
    assert RUNG.estimate(problem, chosen) == pytest.approx(measured, rel=0.1)


def test_splits_are_those_that_shorten_the_sum() -> None:
    """8 slabs by 5, 6 or 7 blocks leave two to one of them, as by 4; and all clusters run at once."""
    problem = Conv2dProblem.square(512, 512, 7, 3, batch=1, dtype="fp16", layout="nhwc")
    for config in RUNG.configs(problem):
        assert isinstance(config, StreamedConfig) and config.splits in (1, 2, 3, 4, 8)
        (call,) = RUNG.recipe(problem, config).steps
        assert isinstance(call, KernelCall) and call.grid[0] // config.splits <= CLUSTERS[config.splits]


def test_a_shortcut_costs_less_than_an_image_of_its_own() -> None:
    plain = replace(LARGE, bias=True, relu=True)
    joined = replace(plain, shortcut_channels=128, shortcut_stride=2, shortcut_size=(28, 28))
    config = RUNG.configs(plain)[0]
    without, both = RUNG.estimate(plain, config), RUNG.estimate(joined, config)
    assert without and both and without < both < 1.3 * without


@pytest.mark.parametrize("batch", [1, 32])
def test_configs_fit_and_do_not_spill(batch: int, sample: Sample) -> None:
    problem = replace(LARGE, batch=batch, bias=True, residual=True, relu=True)
    for config in sample(RUNG.configs(problem)[:3], 1):
        (call,) = RUNG.recipe(problem, config).steps
        assert isinstance(call, KernelCall) and call.shared_bytes <= MOST_SHARED
        assert compile_program(call.program, "sm_90a").resources.spill_bytes == 0, config
    joined = replace(
        problem, residual=False, shortcut_channels=128, shortcut_stride=2, shortcut_size=(28, 28)
    )
    (kernel,) = RUNG.recipe(joined, RUNG.configs(joined)[0]).programs
    assert compile_program(kernel, "sm_90a").resources.spill_bytes == 0
