"""conv2d_input_gradient's rungs: odd sizes on the twin, argmax indices and masks, refusals, the choice, registers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade.device.nvrtc import compile_program
from escalade.device.recipe import KernelCall, Recipe
from escalade.device.run import Executable, TwinOptions, bind
from escalade.device.twin import Order
from escalade.ops import OPERATIONS, conv2d_input_gradient
from escalade.ops.base.accuracy import relative_error
from escalade.ops.choose.choice import choose
from escalade.ops.conv2d.rungs.sm90_persistent import PersistentConfig
from escalade.ops.conv2d_input_gradient import Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.operation import GROUPED
from tests.support import Sample, check

CPU = torch.device("cpu")
OPERATION = OPERATIONS["conv2d_input_gradient"]
NAMES = tuple(rung.name for rung in OPERATION.ladder)
parse = Conv2dInputGradientProblem.parse


def half(name: str, dtype: str = "fp16") -> Conv2dInputGradientProblem:
    return parse(name, dtype, "nhwc")


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_shared_tile_in_several_chunks(layout: str, seed: int) -> None:
    """Three chunks of filters, the last not full, and tiles past the image: with checks for races between chunks."""
    problem, rung = parse("35to19_7x9_k3s2x1_b2_mask", "fp32", layout), OPERATION.ladder.rung("shared_tile")
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    check(OPERATION, rung, problem, rung.configs(problem)[0], CPU, seed, options)


@pytest.mark.share(7)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "name",
    [
        "128to64_5x7_k3s1_b3_mask",
        "72to136_6x5_k3s2_b2_mask",  # partial k-tiles and tiles
        "64to64_9x8_k3s2p2d2_b1",
        "64to64_7_k2s3_b1_mask",
        "64to64_4_k1s1p2_b1_mask",  # windows that begin inside the image
        "67to64_5_k3s2_b1_mask",  # an odd row of results
    ],
)
def test_the_persistent_rung_on_odd_sizes(name: str, dtype: str, seed: int) -> None:
    problem, rung = half(name, dtype), OPERATION.ladder.rung("persistent")
    check(OPERATION, rung, problem, rung.configs(problem)[0], CPU, seed)


@pytest.mark.parametrize("name", ["136to72_9x11_k3s2_b3_mask", "64to72_6x7_k1s2_b2"])
def test_every_tile_is_placed(name: str, seed: int, sample: Sample) -> None:
    """Through shared memory, where masks arrive, and straight from registers."""
    problem, rung = half(name), OPERATION.ladder.rung("persistent")
    configs = rung.configs(problem)
    assert {config.as_dict()["buffers"] for config in configs} > {0, 1}
    for config in sample(configs, 2):
        check(OPERATION, rung, problem, config, CPU, seed)


def test_every_tile_takes_the_filter_as_it_lies_or_turned_around(seed: int) -> None:
    """Filters as rows and as columns of the product, CTAs and warpgroups that share a sum, tiles of 32 channels."""
    problem, rung = half("72to136_5x4_k3s1_b2_mask"), OPERATION.ladder.rung("persistent")
    configs = [
        config
        for config in rung.configs(problem)
        if isinstance(config, PersistentConfig) and config.splits <= 3
    ]
    assert {config.swapped for config in configs if config.supports_mn_major} == {False, True}
    assert {config.share for config in configs if config.supports_mn_major} > {"turns", "depth"}
    kinds = {(one.swapped, one.share, one.supports_mn_major, one.splits > 1): one for one in configs}
    for config in kinds.values():
        assert len(rung.recipe(problem, config).steps) == (1 if config.supports_mn_major else 2)
        check(OPERATION, rung, problem, config, CPU, seed)


@pytest.mark.parametrize(
    ("rung", "name", "dtype", "flips"),
    [
        ("persistent", "64to64_9_k3s2_b2", "bf16", False),
        ("window", "64to64_9_k3s2_b2", "fp16", False),
        ("streamed_window", "64to64_9_k3s2_b2", "bf16", False),
        ("persistent", "67to64_9_k3s2_b2", "fp16", True),  # channels that no copy size divides
        ("wgmma_split", "64to64_9_k3s2_b2", "fp32", True),
        ("tma_wgmma", "64to64_9_k3s2_b2", "fp16", True),
    ],
)
def test_launches_turn_the_filter_around_only_where_it_cannot_be_read_as_it_lies(
    rung: str, name: str, dtype: str, flips: bool
) -> None:
    problem, one = half(name, dtype), OPERATION.ladder.rung(rung)
    recipe = one.recipe(problem, one.configs(problem)[0])
    assert sum("flip" in step.program.source for step in recipe.steps) == (4 if flips else 0)
    assert any("flipped" in space.name for space in recipe.workspaces) == flips
    if not flips:
        assert len(recipe.steps) == 4 and not recipe.workspaces


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (
            "72to136_6x5_k3s2_b2_mask",
            "fp16",
        ),  # partial k-tiles and tiles, phases with one to four taps
        ("64to64_8x6_k4s2p1_b2_bias+relu", "bf16"),
        (
            "60to64_7_k5x2s3x2p2x0_b1_res",
            "fp16",
        ),  # rows of results that no copy size divides, phases of two sizes
        ("72to64_9x8_k3s2p2d3_b1", "bf16"),  # windows that begin inside the image
        ("68to36_7x6_k3s2_b2_mask", "tf32"),
    ],
)
def test_all_classes_of_pixels_in_one_launch(name: str, dtype: str, seed: int, sample: Sample) -> None:
    problem, rung = half(name, dtype), OPERATION.ladder.rung("one_launch")
    for config in sample(rung.configs(problem), 1):
        assert len(rung.recipe(problem, config).after_packing.steps) == 1
        check(OPERATION, rung, problem, config, CPU, seed)


@pytest.mark.parametrize("mask", ["", "_mask"])
def test_tiles_of_all_classes_follow_each_other_without_a_race(mask: str, seed: int, sample: Sample) -> None:
    """Three CTAs have tiles of phases with one to four taps, in rounds of which the last is smaller."""
    problem, rung = half(f"64to64_19x17_k3s2_b2{mask}"), OPERATION.ladder.rung("one_launch")
    inputs = OPERATION.inputs(problem, CPU, seed)
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    configs = [one for one in rung.configs(problem) if isinstance(one, PersistentConfig) and one.parts == 1]
    for config in sample([config for config in configs if config.pixels == 64], 1):
        (call,) = rung.recipe(problem, config).steps
        assert isinstance(call, KernelCall) and call.grid[0] > 9
        y = OPERATION.output(problem, CPU)
        few = Recipe((replace(call, grid=(3, 1, 1)),))
        Executable(few, CPU, options=options, weights_ready=True).bind({**inputs, "y": y})()
        assert relative_error(y, OPERATION.reference(problem, inputs)) < 1e-3


def test_blocks_that_share_the_sums_of_classes_have_a_slab_each() -> None:
    rung = OPERATION.ladder.rung("one_launch")

    def splits(name: str) -> int:
        return max(config.as_dict()["splits"] for config in rung.configs(half(name)))

    assert splits("256to512_8_k4s2p1_b8_bias") > 2
    assert splits("64to256_8_k3s2_b1") == 4  # a phase with a single tap, of four k-tiles
    assert splits("64to64_8_k3s2_b1") == 1


@pytest.mark.parametrize(
    ("name", "dtype", "reason"),
    [
        ("64to64_9_k3s1_b1", "fp16", "several sub-pixel phases"),
        ("64to64_9_k3s2_b1", "fp32", "not fp32"),
        ("64to64_9_k1s2_b1", "fp16", "needs a tap"),
        ("64to67_9_k3s2_b1", "fp16", "16 bytes"),
        ("64to64_20_k5s5_b1", "fp16", "16 at most"),
        ("64to64_9_k3s2g2_b1", "fp16", "groups=1"),
        ("8to8_4_k2s2p0_b150000000", "fp16", "32 bits"),
    ],
)
def test_what_one_launch_refuses(name: str, dtype: str, reason: str) -> None:
    assert reason in (OPERATION.ladder.rung("one_launch").supports(half(name, dtype)) or "")


@pytest.mark.parametrize(
    ("name", "dtype", "shuffled"),
    [
        ("1to8_13x11_k9s3_b1_bias+relu", "fp16", True),  # results that begin a row and a column later
        ("3to4_29_k16s8p4_b1", "fp16", True),  # more phases than launches could be
        ("8to8_9x11_k3s2x1p2d2x3_b1_bias", "bf16", True),  # some pixels have no tap, and get the bias
        ("4to6_10x7_k4x3s3x2p2x0_b2_bias[x*sigmoid(x)]", "tf32", True),
        ("5to3_9_k3s2_b1_bias", "fp32", True),
        ("32to24_4x3_k4x3s4x3p0_b3_bias+relu", "fp16", False),  # a single phase, stored as is
    ],
)
def test_all_classes_of_pixels_by_one_convolution(
    name: str, dtype: str, shuffled: bool, seed: int, sample: Sample
) -> None:
    problem, rung = half(name, dtype), OPERATION.ladder.rung("subpixel")
    for config in sample(rung.configs(problem)[:3], 1):
        recipe = rung.recipe(problem, config)
        assert ("shuffle" in recipe.steps[-1].program.source) == shuffled
        assert "filters" in recipe.packing.steps[0].program.source
        check(OPERATION, rung, problem, config, CPU, seed)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("8to8_9_k3s1_b1", "single phase"),
        ("8to8_9_k3s2_b1_mask", "support a mask"),
        ("8to8_9_k3s2g2_b1", "groups=1"),
        ("1to1_1_k1s3p1_b1", "needs a tap"),
    ],
)
def test_what_subpixel_refuses(name: str, reason: str) -> None:
    assert reason in (OPERATION.ladder.rung("subpixel").supports(half(name)) or "")


def test_an_estimate_without_the_launch_that_turns_the_filter_around() -> None:
    rung = OPERATION.ladder.rung("persistent")
    lying, flipped = half("64to64_28_k3s1_b8"), half("60to64_28_k3s1_b8")
    config = PersistentConfig(64, 64, "turns", 8)
    times = [rung.estimate(problem, config) for problem in (lying, flipped)]
    assert times[0] and times[1] and times[1] - times[0] >= 1.0


def test_results_go_straight_to_dx_where_they_do_not_lie_together() -> None:
    rung = OPERATION.ladder.rung("persistent")

    def straight(name: str) -> set[bool]:
        return {config.as_dict()["buffers"] == 0 for config in rung.configs(half(name))}

    assert straight("128to128_28_k3s1_b256") == {False}
    assert straight("128to128_28_k3s2_b256") == {False, True}
    assert straight("128to128_28_k3s9x1_b256") == {True}  # larger steps than TMA supports
    assert straight("67to64_28_k3s1_b256") == {True}  # rows of results that no copy size divides
    assert any(config.as_dict()["splits"] > 1 for config in rung.configs(half("512to512_7_k3s1_b8")))


WINDOWED = [
    ("window", "64to64_9x7_k3s1_b2_mask"),
    ("window", "128to64_9x8_k3s2_b1_mask"),  # windows that end beyond one side, phases of two sizes
    ("window", "64to64_4_k1s1p2_b1_mask"),  # windows that begin inside the image
    ("window", "64to64_7x10_k2s3x1_b1_mask"),
    ("window", "64to64_9x11_k3s2p2d2_b2"),
    ("streamed_window", "64to128_5x7_k3s1_b2_mask"),
    ("streamed_window", "128to72_9x7_k3s2_b2_mask"),  # a partial k-tile
    ("streamed_window", "64to72_6x7_k1s2_b2_mask"),
    ("streamed_window", "64to256_3_k3s1_b1_mask"),  # CTAs of a cluster share the filters
]


@pytest.mark.share(7)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("rung", "name"), WINDOWED)
def test_windows_on_odd_sizes(rung: str, name: str, dtype: str, seed: int) -> None:
    problem, one = half(name, dtype), OPERATION.ladder.rung(rung)
    check(OPERATION, one, problem, one.configs(problem)[0], CPU, seed)


@pytest.mark.share(7)
@pytest.mark.parametrize(
    "name",
    [
        "64to36_5x7_k3s1_b2_mask",  # a partial k-tile
        "128to32_9x8_k3s2_b2_mask",
        "64to36_6x7_k1s2_b2_mask",
    ],
)
def test_tf32_is_masked_and_placed_by_the_product(name: str, seed: int) -> None:
    problem, rung = half(name, "tf32"), OPERATION.ladder.rung("streamed_window")
    check(OPERATION, rung, problem, rung.configs(problem)[0], CPU, seed)


@pytest.mark.share(7)
@pytest.mark.parametrize(
    "name",
    [
        "40to24_5x7_k3s1_b2_mask",
        "67to6_9x8_k3s2_b2_mask",  # filters that no copy size divides, an odd row of results
        "24to72_6x7_k1s2_b2_mask",
        "8to8_4_k1s1p2_b1_mask",  # windows that begin inside the image
    ],
)
def test_fp32_is_masked_and_placed_by_the_product(name: str, seed: int, sample: Sample) -> None:
    problem, rung = half(name, "fp32"), OPERATION.ladder.rung("wgmma_split")
    for config in sample(rung.configs(problem), 1):
        check(OPERATION, rung, problem, config, CPU, seed)


@pytest.mark.share(7)
@pytest.mark.parametrize("scale", [1e-37, 1e-30, 1e-6, 1.0, 1e5, 1e30])
def test_gradients_of_any_magnitude_take_one_attempt(scale: float, seed: int) -> None:
    """In fp32: the first attempt samples the magnitudes, also if the largest is 50 times as large."""
    problem, rung = half("24to40_24x23_k3s1_b2", "fp32"), OPERATION.ladder.rung("wgmma_split")
    inputs = OPERATION.inputs(problem, CPU, seed)
    inputs["gradient"] *= scale
    inputs["gradient"][0, 3, 4, 5] *= 50
    recipe = rung.recipe(problem, rung.configs(problem)[0])
    y, expected = OPERATION.output(problem, CPU), OPERATION.reference(problem, inputs)
    first = replace(recipe, steps=recipe.steps[:-1])
    bind(first, {**inputs, "y": y})()
    assert relative_error(y, expected) < 1e-6
    bind(recipe, {**inputs, "y": y})()
    assert relative_error(y, expected) < 1e-6


@pytest.mark.parametrize("outlier", [1e6, 1e-6])
def test_a_sample_that_misleads_is_made_up_for(outlier: float, seed: int) -> None:
    problem, rung = half("8to40_24x23_k3s1_b2", "fp32"), OPERATION.ladder.rung("wgmma_split")
    inputs = OPERATION.inputs(problem, CPU, seed)
    inputs["gradient"] *= 1e-4 if outlier > 1 else 0
    inputs["gradient"][1, 21, 12, 13] = outlier
    y = OPERATION.output(problem, CPU)
    bind(rung.recipe(problem, rung.configs(problem)[0]), {**inputs, "y": y})()
    assert relative_error(y, OPERATION.reference(problem, inputs)) < 1e-6


@pytest.mark.share(7)
@pytest.mark.parametrize("name", ["64to64_9x11_k3s1_b1_mask", "64to64_9x11_k3s2_b1_mask"])
@pytest.mark.parametrize("rung", ["window", "streamed_window"])
def test_windows_of_every_config(rung: str, name: str, seed: int, sample: Sample) -> None:
    problem, one = half(name), OPERATION.ladder.rung(rung)
    for config in sample(one.configs(problem), 1):
        check(OPERATION, one, problem, config, CPU, seed)


def test_the_blocks_of_a_cluster_share_sums_only_where_results_lie_together() -> None:
    rung = OPERATION.ladder.rung("streamed_window")

    def splits(name: str) -> set[int]:
        return {config.as_dict()["splits"] for config in rung.configs(half(name))}

    assert splits("64to256_7_k3s1_b1") - {1}
    assert splits("64to256_7_k3s2_b1") == {1}


@pytest.mark.share(7)
@pytest.mark.parametrize("rung", ["tensor_core", "persistent", "window", "streamed_window"])
def test_classes_do_not_touch_each_other(rung: str, seed: int) -> None:
    problem = half("64to64_5x6_k3s2_b1_mask")
    one = OPERATION.ladder.rung(rung)
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    check(OPERATION, one, problem, one.configs(problem)[0], CPU, seed, options)


WITHOUT = ("col2im", "subpixel", "planes", "one_launch", *GROUPED)
"""Rungs without a mask, a stride of 1, fp16, or ungrouped convolutions."""


@pytest.mark.parametrize("rung", [name for name in NAMES if name not in WITHOUT])
def test_nan_reaches_what_it_meets_and_the_mask_stops_it(rung: str) -> None:
    """As in PyTorch: no gradient passes where the mask is nonpositive, all of it where it is NaN."""
    split = rung.endswith("_split")
    dtype = torch.float32 if split or rung in ("atomics", "implicit_gemm") else torch.float16
    channels, filters = 64, 8 if rung == "skinny" else 64
    gradient = torch.ones(1, filters, 4, 4, dtype=dtype).contiguous(memory_format=torch.channels_last)
    weight = torch.ones(filters, channels, 1, 1, dtype=dtype).contiguous(memory_format=torch.channels_last)
    mask = torch.ones(1, channels, 4, 4, dtype=dtype).contiguous(memory_format=torch.channels_last)
    gradient[0, 5, 1, 2] = torch.nan
    gradient[0, 5, 2, 2] = torch.inf
    mask[0, :32, 1, 2] = 0
    mask[0, 32, 3, 3], mask[0, 33, 3, 3], mask[0, 34, 3, 3] = torch.nan, -1, -0.0
    dx = conv2d_input_gradient(gradient, weight, (4, 4), mask, rung=rung)
    expected = torch.full((1, channels, 4, 4), float(filters), dtype=dtype)
    expected[0, 32:, 1, 2] = torch.nan
    # Split operands turn an infinity into NaN.
    expected[0, :, 2, 2] = torch.nan if split else torch.inf
    expected[0, :32, 1, 2] = expected[0, 33:35, 3, 3] = 0
    torch.testing.assert_close(dx, expected, equal_nan=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"groups": 2}, "groups=1"),
        ({"stride": (5, 4)}, "16 at most"),
        ({"layout": "nchw"}, "layout nhwc"),
        ({"dtype": "fp32"}, "not fp32"),
        ({"filters": 100}, "16 bytes"),
        ({"filter_width": 131, "width": 300, "padding": (1, 0)}, "corners"),
    ],
)
def test_what_the_persistent_rung_refuses(changes: dict[str, Any], reason: str) -> None:
    rung, forward = OPERATION.ladder.rung("persistent"), half("128to128_28_k3s1_b256").forward
    assert rung.supports(Conv2dInputGradientProblem(forward)) is None
    assert reason in (rung.supports(Conv2dInputGradientProblem(replace(forward, **changes))) or "")


def test_it_refuses_what_no_tap_meets_and_too_many_rows() -> None:
    rung = OPERATION.ladder.rung("implicit_gemm")
    assert "needs a tap" in (rung.supports(parse("1to1_1_k1s3p1_b1")) or "")
    assert "rows of pixels in 32 bits" in (rung.supports(parse("64to1_56x1_k1s2_b1000000")) or "")


def test_the_choice() -> None:
    def rung(problem: Conv2dInputGradientProblem) -> str:
        return choose(OPERATION, problem, CPU).rung.name

    assert rung(half("64to64_56_k3s1_b256_mask")) == "window"
    assert rung(half("128to128_28_k3s1_b8")) == "streamed_window"
    assert rung(half("256to256_14_k3s1_b256_mask")) == "persistent"
    assert rung(half("128to128_28_k3s2_b256", "tf32")) == "one_launch"
    assert rung(half("128to256_16_k4s2p1_b8_bias+relu")) == "one_launch"
    assert rung(half("1to56_766_k9s3_b1_bias")) == rung(half("21to21_512_k16s8p4_b1", "fp32")) == "subpixel"
    assert rung(half("128to128_28_k3s1_b256", "tf32")) == "tma_wgmma"
    assert rung(half("3to12_28_k3s1_b256")) == "tensor_core"
    assert rung(half("128to128_28_k3s1_b256", "fp32")) == "wgmma_split"
    assert rung(half("128to4_28_k3s1_b256", "fp32")) == "skinny"
    assert rung(half("128to6_28_k3s1_b256", "fp32")) == "implicit_gemm"
    assert rung(half("128to128_28_k3s1g4_b256")) == "grouped"
    assert rung(parse("128to128_28_k3s1_b256", "fp32", "nchw")) == "implicit_gemm"
    assert choose(OPERATION, parse("128to128_28_k3s1_b2", "fp16"), CPU).problem.layout == "nhwc"


@pytest.mark.share(7)
@pytest.mark.parametrize(
    ("rung", "name", "configs"),
    [
        ("shared_tile", "64to128_56_k3s2_b256_mask", 1),
        ("persistent", "128to128_28_k3s1_b256_mask", 2),
        ("persistent", "64to128_56_k3s2_b256_mask", 1),
        ("window", "64to64_56_k3s1_b256_mask", 1),
        ("window", "128to64_56_k3s2_b32_mask", 1),
        ("streamed_window", "256to256_14_k3s1_b256_mask", 1),
        ("streamed_window", "64to128_56_k3s2_b256_mask", 1),
        ("wgmma_split", "64to128_56_k3s2_b256_mask", 1),
        ("one_launch", "256to512_8_k4s2p1_b8_bias+relu", 2),
        ("one_launch", "64to128_56_k3s2_b32_mask", 1),
    ],
)
def test_no_config_spills(rung: str, name: str, configs: int, sample: Sample) -> None:
    problem, one = half(name, "fp32" if rung == "wgmma_split" else "fp16"), OPERATION.ladder.rung(rung)
    for config in sample(one.configs(problem), configs):
        programs = one.recipe(problem, config).programs
        for program in sample(programs, 2):  # all phases of a stride share one source
            assert compile_program(program, "sm_90a").resources.spill_bytes == 0, config
