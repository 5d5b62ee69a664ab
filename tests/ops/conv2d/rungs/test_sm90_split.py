"""fp32 from fp16 halves by wgmma: accuracy, huge and tiny numbers, odd sizes on the twin, registers."""

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
from escalade.ops.conv2d import Conv2dOperation, Conv2dProblem
from escalade.ops.conv2d.rungs import sm90_split
from escalade.ops.conv2d.rungs.sm90_split import CONFIGS, SplitConfig
from escalade.ops.conv2d.rungs.wgmma_conv import WgmmaConv
from tests.support import TINY, Sample, check

CPU = torch.device("cpu")
CONV2D = Conv2dOperation()
(RUNG,) = sm90_split.RUNGS
LARGE = Conv2dProblem.square(128, 128, 28, 3, batch=256, layout="nhwc")
SMALL_TILE = next(config for config in CONFIGS if (config.warpgroups, config.filters) == (1, 64))
each_config = pytest.mark.parametrize("config", CONFIGS, ids=str)


def nhwc(*sizes: Any, **rest: Any) -> Conv2dProblem:
    return Conv2dProblem(*sizes, **{"layout": "nhwc", **rest})


PROBLEMS = {
    "one_slab": nhwc(1, 32, 3, 5, 64, 1, 1),
    "two_slabs": nhwc(3, 64, 7, 5, 72, 1, 1, bias=True),
    "more_slabs_than_stages": nhwc(
        1, 64, 5, 7, 64, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True
    ),
    "slab_not_full": nhwc(2, 40, 6, 5, 24, 3, 3, padding=(1, 1), residual=True),
    "odd_channels_and_filters": nhwc(2, 5, 7, 9, 7, 3, 3, (2, 2), (1, 1), bias=True, residual=True),
    "one_channel": nhwc(2, 1, 9, 8, 3, 5, 5, relu=True),
    "stride_3_and_1": nhwc(2, 8, 11, 8, 10, 3, 2, (3, 1), (1, 0)),
    "dilation": nhwc(1, 16, 11, 13, 8, 3, 3, (1, 2), (2, 3), (2, 3), bias=True),
    "row_filter": nhwc(1, 8, 6, 9, 16, 1, 3, padding=(0, 1)),
    "wide_padding": nhwc(1, 8, 3, 2, 16, 2, 3, padding=(3, 2), bias=True),
    "shortcut": nhwc(
        2, 24, 6, 5, 40, 3, 3, padding=(1, 1), bias=True, relu=True, shortcut_channels=36, shortcut_stride=2
    ),
    "shortcut_odd": nhwc(1, 8, 4, 4, 8, 1, 1, residual=True, shortcut_channels=6, shortcut_size=(4, 4)),
}


def run(
    problem: Conv2dProblem, inputs: dict[str, torch.Tensor], config: SplitConfig = SMALL_TILE
) -> torch.Tensor:
    y = CONV2D.output(problem, CPU).fill_(torch.nan)
    bind(RUNG.recipe(problem, config), {**inputs, "y": y})()
    return y


# --- sizes


@pytest.mark.share(7)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_small_odd_sizes(problem: Conv2dProblem, seed: int) -> None:
    check(CONV2D, RUNG, problem, RUNG.configs(problem)[0], CPU, seed)


@pytest.mark.share(7)
@each_config
def test_every_tile_is_right_where_the_last_is_not_full(config: SplitConfig, seed: int) -> None:
    problem = nhwc(3, 36, 9, 11, 130, 2, 1, bias=True, residual=True, relu=True)
    check(CONV2D, RUNG, problem, config, CPU, seed)


@pytest.mark.share(7)
@each_config
@pytest.mark.parametrize("channels", [8, 40, 72], ids="{}_channels".format)
def test_blocks_go_on_with_other_tiles(config: SplitConfig, channels: int, seed: int) -> None:
    """Three or more per CTA, with odd and even numbers of k-tiles: the ring continues across tiles."""
    problem = nhwc(2, channels, 23, 17, 136, 1, 1)
    assert config.tiles(WgmmaConv.of(problem)) >= 3 * config.blocks_per_sm
    check(CONV2D, RUNG.on(TINY), problem, config, CPU, seed)


@pytest.mark.share(7)
@each_config
def test_stages_are_reused_without_a_race(config: SplitConfig, seed: int) -> None:
    """Copies as late as allowed, shuffled threads."""
    problem = nhwc(1, 100, 3, 5, 66, 3, 1, padding=(1, 0), bias=True)
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    check(CONV2D, RUNG, problem, config, CPU, seed, options)


# --- accuracy


def test_long_sums_have_the_accuracy_of_fp32(seed: int) -> None:
    """4608 products: a plain sum in fp32 is off by 1.2e-6."""
    problem = nhwc(1, 512, 7, 7, 64, 3, 3, padding=(1, 1))
    inputs = CONV2D.inputs(problem, CPU, seed)
    assert relative_error(run(problem, inputs), CONV2D.reference(problem, inputs)) < 3.2e-7


@pytest.mark.parametrize(
    ("x_scale", "weight_scale"),
    [
        (1e30, 1.0), (1e30, 1e-30), (3e4, 1e20), (3e4, 1e-30), (0.1, 1.0), (0.1, 1e30), (1e-3, 1e-20), (1e-30, 1.0),
        (1e-30, 1e30),
    ],
)  # fmt: skip
def test_huge_and_tiny_numbers(x_scale: float, weight_scale: float, seed: int) -> None:
    """Also if the combined power of two exceeds fp32's range; filters have separate powers."""
    problem = nhwc(1, 40, 4, 5, 16, 3, 3, padding=(1, 1))
    inputs = CONV2D.inputs(problem, CPU, seed)
    inputs["x"] = inputs["x"] * x_scale
    spread = torch.logspace(-2, 2, 16).view(-1, 1, 1, 1)
    inputs["weight"] = (inputs["weight"] * spread * weight_scale).contiguous(
        memory_format=torch.channels_last
    )
    y, expected = run(problem, inputs), CONV2D.reference(problem, inputs)
    for filter_ in range(16):
        assert relative_error(y[:, filter_], expected[:, filter_]) < 4e-7


def test_small_numbers_beside_large_ones_keep_their_bits(seed: int) -> None:
    """The first attempt's power of two loses 2^-32 at most: little, for images 2000 times smaller than the largest."""
    problem = nhwc(2, 32, 4, 5, 16, 1, 1)
    inputs = CONV2D.inputs(problem, CPU, seed)
    inputs["x"][0] *= 60.0 / inputs["x"][0].abs().max()
    inputs["x"][1] *= 0.03 / inputs["x"][1].abs().max()
    y, expected = run(problem, inputs), CONV2D.reference(problem, inputs)
    assert relative_error(y[1], expected[1]) < 4e-7


def test_zeros_give_zeros() -> None:
    problem = nhwc(1, 8, 3, 3, 8, 3, 3, padding=(1, 1))
    inputs = CONV2D.inputs(problem, CPU, 0)
    assert run(problem, {**inputs, "x": torch.zeros_like(inputs["x"])}).eq(0).all()
    assert run(problem, {**inputs, "weight": torch.zeros_like(inputs["weight"])}).eq(0).all()


def test_what_was_noted_of_one_call_is_forgotten_in_the_next(seed: int) -> None:
    """Huge numbers take the second launch; the call after them must not."""
    problem = nhwc(1, 16, 5, 4, 8, 1, 1)
    inputs = CONV2D.inputs(problem, CPU, seed)
    y, magnitudes = CONV2D.output(problem, CPU), torch.zeros(8, dtype=torch.uint8)
    call = bind(RUNG.recipe(problem, SMALL_TILE), {**inputs, "y": y, "magnitudes": magnitudes})
    usual = inputs["x"].clone()
    for scale in (1e20, 1.0, 1e-20, 1.0):
        inputs["x"].copy_(usual * scale)
        call()
        assert not magnitudes.any()
        assert relative_error(y, CONV2D.reference(problem, inputs)) < 4e-7


# --- non-finite values


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_nan_and_infinity_reach_the_pixels_that_see_them_and_no_other(scale: float, seed: int) -> None:
    """Neither affects the power of two: neighboring pixels keep their accuracy."""
    problem = nhwc(1, 40, 4, 5, 16, 1, 1, relu=True)
    inputs = CONV2D.inputs(problem, CPU, seed)
    inputs["x"] = inputs["x"] * scale
    clean = CONV2D.reference(problem, inputs)
    inputs["x"][0, 0, 1, 2], inputs["x"][0, 5, 3, 4] = torch.nan, torch.inf
    y = run(problem, inputs)
    assert y[0, :, 1, 2].isnan().all()
    assert not y[0, :, 3, 4].isfinite().any(), "an infinity becomes NaN"
    others = torch.ones(4, 5, dtype=torch.bool)
    others[1, 2] = others[3, 4] = False
    assert relative_error(y[..., others], clean[..., others]) < 4e-7


def test_a_weight_that_is_not_finite_spoils_its_filter_alone(seed: int) -> None:
    problem = nhwc(1, 8, 4, 5, 6, 1, 1)
    inputs = CONV2D.inputs(problem, CPU, seed)
    clean = CONV2D.reference(problem, inputs)
    inputs["weight"][1, 3], inputs["weight"][4, 0] = torch.nan, torch.inf
    y = run(problem, inputs)
    assert y[:, [1, 4]].isnan().all()
    assert relative_error(y[:, [0, 2, 3, 5]], clean[:, [0, 2, 3, 5]]) < 4e-7


# --- compiler output


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "fp16"}, "takes fp32"),
        ({"dtype": "tf32"}, "takes fp32"),
        ({"dtype": "fp8"}, "not fp8; persistent does"),
        ({"layout": "nchw"}, "layout nhwc"),
        ({"groups": 2}, "groups=1"),
        ({"stride": (9, 1)}, "strides up to 8"),
        ({"padding": (129, 1)}, "corners"),
        ({"filter_width": 3, "dilation": (1, 128), "width": 400}, "corners"),
        ({"shortcut_channels": 64, "shortcut_stride": 9}, "strides up to 8"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], reason: str) -> None:
    assert RUNG.supports(LARGE) is None
    assert reason in (RUNG.supports(replace(LARGE, **changes)) or "")


def test_it_is_for_hopper_alone() -> None:
    assert (
        RUNG.on(typical_card("sm_90a")).refusal(LARGE) is None
        and RUNG.on(typical_card(None)).refusal(LARGE) is None
    )
    assert "sm_90a" in (RUNG.on(typical_card("sm_100")).refusal(LARGE) or "")


def test_large_problems_take_large_tiles_and_small_ones_small_tiles() -> None:
    def tile(problem: Conv2dProblem) -> tuple[int, int]:
        config = RUNG.configs(problem)[0]
        assert isinstance(config, SplitConfig)
        return config.pixels, config.filters

    assert tile(LARGE) == (128, 128)
    assert tile(replace(LARGE, filters=64)) == (192, 64)
    assert tile(replace(LARGE, batch=1)) == (64, 64)


def test_the_blocks_of_a_multiprocessor_fit() -> None:
    for config in CONFIGS:
        for call in RUNG.recipe(LARGE, config).steps:
            assert isinstance(call, KernelCall)
            assert (call.shared_bytes + 1024) * config.blocks_per_sm <= HOPPER_SHARED + 1024


@pytest.mark.share(7)
@pytest.mark.parametrize(
    "changes",
    [{}, {"bias": True, "residual": True, "relu": True}, {"filters": 101, "shortcut_channels": 64}],
    ids=["plain", "epilogue", "odd_with_shortcut"],
)
def test_no_config_spills_or_waits_after_every_product(changes: dict[str, Any], sample: Sample) -> None:
    """ptxas reports that it cannot tell which products are finished, and then waits for each."""
    for config in sample(CONFIGS, 1):
        for program in RUNG.recipe(replace(LARGE, **changes), config).programs:
            compiled = compile_program(program, "sm_90a")
            assert compiled.resources.spill_bytes == 0, config
            assert "(C75" not in compiled.log, config
