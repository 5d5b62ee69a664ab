"""Windows of any number of channels: odd sizes on the twin, consecutive tiles, clusters, registers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from escalade.device.nvrtc import compile_program
from escalade.device.recipe import KernelCall, Recipe
from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Order
from escalade.ops.base.card import H200, HOPPER_SHARED
from escalade.ops.conv2d import Conv2dOperation, Conv2dProblem
from escalade.ops.conv2d.rungs.sm90_streamed_window import RUNGS, StreamedConfig, StreamedWindow
from escalade.ops.conv2d.rungs.wgmma_conv import WgmmaConv
from tests.support import Sample, check

CPU = torch.device("cpu")
CONV2D = Conv2dOperation()
(RUNG,) = RUNGS
LARGE = Conv2dProblem.square(256, 256, 14, 3, batch=32, dtype="fp16", layout="nhwc")


def half(*sizes: Any, **rest: Any) -> Conv2dProblem:
    return Conv2dProblem(*sizes, **{"dtype": "fp16", "layout": "nhwc", **rest})


def single(*sizes: Any, **rest: Any) -> Conv2dProblem:
    return half(*sizes, **{"dtype": "tf32", **rest})


@dataclass(frozen=True)
class FewBlocks(StreamedWindow):
    """Few enough that each has many tiles."""

    blocks: int = 1

    def conv_recipe(self, conv: WgmmaConv, config: StreamedConfig) -> Recipe:
        recipe = super().conv_recipe(conv, config)
        *before, call = recipe.steps
        assert isinstance(call, KernelCall)
        return replace(recipe, steps=(*before, replace(call, grid=(self.blocks, 1, 1))))


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
    "tf32": single(2, 64, 5, 7, 128, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True),
    "tf32_pointwise": single(3, 32, 7, 5, 64, 1, 1, bias=True),
    "tf32_channels_end_in_a_slab": single(1, 36, 6, 5, 64, 1, 3, padding=(0, 1), bias=True, relu=True),
    "tf32_dilation": single(1, 32, 9, 8, 64, 3, 2, (1, 1), (2, 1), (2, 3), residual=True),
    "tf32_wide": single(1, 32, 3, 70, 64, 3, 3, padding=(1, 1), residual=True),
    "tf32_strided_shortcut": single(
        1, 32, 5, 6, 128, 1, 3, padding=(0, 1), residual=True,
        shortcut_channels=44, shortcut_stride=2, shortcut_size=(10, 11),
    ),
}  # fmt: skip


@pytest.mark.share(7)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_small_odd_sizes(problem: Conv2dProblem, seed: int) -> None:
    check(CONV2D, RUNG, problem, RUNG.configs(problem)[0], CPU, seed)


STACKS = {
    "several_tiles": (half(7, 64, 5, 6, 64, 3, 3, padding=(1, 1), bias=True, relu=True), 3, 1),
    "residual": (half(5, 72, 7, 7, 128, 3, 3, padding=(1, 1), residual=True, relu=True), 4, 1),
    "shared_sum": (half(5, 128, 5, 6, 64, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True), 2, 2),
    "wide_filter": (half(4, 64, 3, 5, 64, 5, 7, padding=(2, 3), bias=True), 4, 1),
    "dilation": (half(3, 64, 4, 5, 64, 3, 3, (1, 1), (2, 2), (2, 2), bias=True), 2, 1),
    "pointwise": (half(6, 64, 3, 5, 64, 1, 1, bias=True), 5, 1),
    "shortcut": (
        half(
            5, 128, 5, 6, 64, 3, 3, padding=(1, 1), bias=True, relu=True, shortcut_channels=72, shortcut_stride=2,
            shortcut_size=(9, 11),
        ), 3, 2,
    ),
    "tf32": (single(5, 64, 5, 6, 64, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True), 3, 1),
}  # fmt: skip


@pytest.mark.share(7)
@pytest.mark.parametrize(("problem", "images", "splits"), STACKS.values(), ids=STACKS)
def test_several_images_share_their_padding(
    problem: Conv2dProblem, images: int, splits: int, seed: int
) -> None:
    """The last tile has fewer; a CTA has several tiles, so that windows are reused."""
    config = StreamedConfig(problem.output_height, problem.output_width, 2, 4, splits, images)
    rung = FewBlocks(RUNG.name, "", None, None, ("fp16", "tf32")) if splits == 1 else RUNG
    check(
        CONV2D, rung, problem, config, CPU, seed, TwinOptions(checks=True, order=Order(seed=seed, late=True))
    )


def test_images_are_stacked_where_they_are_small_and_have_a_frame() -> None:
    def stacks(problem: Conv2dProblem) -> set[int]:
        return {images for c in RUNG.configs(problem) if (images := getattr(c, "images", 1)) > 1}

    square = Conv2dProblem.square
    assert stacks(square(512, 512, 7, 3, batch=32, dtype="fp16", layout="nhwc")) >= {4}
    assert not stacks(square(512, 512, 7, 3, batch=1, dtype="fp16", layout="nhwc"))
    assert not stacks(square(512, 512, 14, 3, batch=32, dtype="fp16", layout="nhwc"))
    assert not stacks(square(512, 512, 7, 3, padding=0, batch=32, dtype="fp16", layout="nhwc"))


def test_every_number_of_splits_and_width(seed: int, sample: Sample) -> None:
    problem = half(1, 256, 9, 10, 64, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True)
    configs = [config for config in RUNG.configs(problem) if isinstance(config, StreamedConfig)]
    first, largest = configs[0], max(configs, key=lambda config: config.rows * config.columns)
    assert first.splits == 4 and (first.rows, first.columns) != (largest.rows, largest.columns)
    cases = [(problem, replace(first, splits=splits)) for splits in (1, 2, 3, 4)]
    cases += [(problem, replace(largest, splits=splits)) for splits in sample((1, 2, 3, 4), 1)]
    whole = half(1, 64, 9, 10, 128, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True)
    wide = [config for config in RUNG.configs(whole) if isinstance(config, StreamedConfig)]
    cases += [(whole, config) for config in sample(wide, 3)]
    for case, config in cases:
        check(CONV2D, RUNG, case, config, CPU, seed)


def test_tiles_follow_each_other_without_a_race(seed: int) -> None:
    """Copies and products as late as allowed, many tiles per CTA."""
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


@pytest.mark.share(7)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(2, 4), (3, 8), (1, 7)])
def test_warpgroups_hand_each_other_one_panel(rows: int, columns: int, residual: bool, seed: int) -> None:
    """Results of 32 bits: tiles of one box and of several, an even and an odd number of them per CTA."""
    problem = single(2, 36, 5, 7, 64, 2, 2, padding=(1, 1), bias=True, residual=residual)
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    config = StreamedConfig(rows=rows, columns=columns, windows=2, tap_stages=4)
    for blocks in (1, 3):
        check(
            CONV2D,
            FewBlocks(RUNG.name, "", None, None, ("tf32",), blocks=blocks),
            problem,
            config,
            CPU,
            seed,
            options,
        )


@pytest.mark.share(7)
@pytest.mark.parametrize(
    ("rows", "columns", "width", "splits"),
    [(1, 9, 16, 4), (7, 7, 64, 8), (5, 7, 48, 4), (8, 29, 248, 2)],
    ids=["few", "even", "uneven", "wide"],
)
def test_parts_are_pushed_without_a_race(rows: int, columns: int, width: int, splits: int, seed: int) -> None:
    """2 blocks of 8 pixels by 4 owners, two of which get nothing; 8 by 8, 6 by 4, and 31 by 2."""
    problem = half(
        1, 64 * splits, rows + 1, columns, 64, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True
    )
    config = StreamedConfig(rows, columns, windows=2, tap_stages=4, splits=splits)
    (program,) = RUNG.recipe(problem, config).programs
    assert dict(program.constants)["WGMMA_N"] == width
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    check(CONV2D, RUNG, problem, config, CPU, seed, options)


@pytest.mark.share(7)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("columns", [4, 7])
def test_shortcuts_in_every_kind_of_tile(splits: int, columns: int, seed: int) -> None:
    """Windows and the smaller pixels of the shortcut, in the same stages; tiles that end inside the image."""
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
        ({"channels": 102, "dtype": "tf32"}, "multiples of 4"),
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
        ("256to256_14_k3s1_b1_bias+res+relu", (5, 14, 4, 1), 3.82),
        ("512to512_7_k3s1_b1_bias+res+relu", (7, 7, 8, 1), 4.16),
        ("128to128_28_k3s1_b8_bias+res+relu", (7, 14, 1, 1), 6.43),
        ("256to256_14_k3s1_b8_bias+res+relu", (7, 14, 2, 1), 7.45),
        ("512to512_7_k3s1_b8_bias+res+relu", (7, 7, 3, 2), 8.89),
        ("256to256_14_k3s1_b32_bias+res+relu", (14, 14, 1, 1), 14.01),
        ("512to512_7_k3s1_b32_bias+relu", (7, 7, 1, 2), 15.53),
        ("64to64_56_k3s1_b256_bias+relu", (4, 56, 1, 1), 91.9),
    ],
)
def test_the_first_config_is_what_was_fastest_on_an_h200(
    name: str, first: tuple[int, int, int, int], measured: float
) -> None:
    problem = Conv2dProblem.parse(name, "fp16", "nhwc")
    chosen = RUNG.configs(problem)[0]
    assert isinstance(chosen, StreamedConfig)
    assert (chosen.rows, chosen.columns, chosen.splits, chosen.images) == first
    assert RUNG.estimate(problem, chosen) == pytest.approx(measured, rel=0.1)


def test_splits_are_those_that_shorten_the_sum() -> None:
    """8 k-tiles by 5, 6 or 7 CTAs leave two to one of them, as by 4; and all clusters run at once."""
    problem = Conv2dProblem.square(512, 512, 7, 3, batch=1, dtype="fp16", layout="nhwc")
    for config in RUNG.configs(problem):
        assert isinstance(config, StreamedConfig) and config.splits in (1, 2, 3, 4, 8)
        (call,) = RUNG.recipe(problem, config).steps
        assert isinstance(call, KernelCall) and call.grid[0] // config.splits <= H200.max_active_clusters(
            config.splits
        )


def test_tf32_has_the_same_tiles_and_no_splits() -> None:
    """A k-tile of half the channels, one panel of twice the size: shared memory holds as much."""
    for batch in (1, 32):
        problem = replace(LARGE, batch=batch, dtype="tf32", residual=True)
        for config in RUNG.configs(problem):
            assert isinstance(config, StreamedConfig) and config.splits == 1
            *_, call = RUNG.recipe(problem, config).steps
            assert isinstance(call, KernelCall) and call.shared_bytes <= HOPPER_SHARED
    for name in ("64to64_56_k3s1_b256_bias+relu", "256to256_14_k3s1_b256_bias+res+relu"):
        tf32, fp16 = (Conv2dProblem.parse(name, dtype, "nhwc") for dtype in ("tf32", "fp16"))
        assert RUNG.configs(tf32)[0] == RUNG.configs(fp16)[0]
        slower, faster = (RUNG.estimate(each, RUNG.configs(each)[0]) for each in (tf32, fp16))
        assert slower and faster and 1.7 < slower / faster < 2


def test_tf32_weights_are_rounded_once_for_all_calls(seed: int) -> None:
    problem = single(1, 32, 4, 5, 64, 1, 1, shortcut_channels=32)
    recipe = RUNG.recipe(problem, RUNG.configs(problem)[0])
    assert len(recipe.packing.steps) == 2 and len(recipe.after_packing.steps) == 1
    inputs = CONV2D.inputs(problem, CPU, seed)
    inputs["x"] = torch.ones_like(inputs["x"])
    inputs["weight"] = torch.full_like(inputs["weight"], 1 + 1.9 * 2.0**-11)  # truncated, it would be 1
    inputs["shortcut"].zero_()
    y = CONV2D.output(problem, CPU)
    bind(recipe, {**inputs, "y": y})()
    assert (y == 32 * (1 + 2.0**-10)).all()


def test_a_shortcut_costs_less_than_an_image_of_its_own() -> None:
    plain = replace(LARGE, bias=True, relu=True)
    joined = replace(plain, shortcut_channels=128, shortcut_stride=2, shortcut_size=(28, 28))
    config = RUNG.configs(plain)[0]
    without, both = RUNG.estimate(plain, config), RUNG.estimate(joined, config)
    assert without and both and without < both < 1.3 * without


@pytest.mark.share(7)
@pytest.mark.parametrize("dtype", ["fp16", "tf32"])
@pytest.mark.parametrize("batch", [1, 32])
def test_configs_fit_and_do_not_spill(batch: int, dtype: str, sample: Sample) -> None:
    problem = replace(LARGE, batch=batch, dtype=dtype, bias=True, residual=True, relu=True)
    for config in sample(RUNG.configs(problem)[:3], 1):
        *_, call = RUNG.recipe(problem, config).steps
        assert isinstance(call, KernelCall) and call.shared_bytes <= HOPPER_SHARED
        assert compile_program(call.program, "sm_90a").resources.spill_bytes == 0, config
    joined = replace(
        problem, residual=False, shortcut_channels=128, shortcut_stride=2, shortcut_size=(28, 28)
    )
    *_, kernel = RUNG.recipe(joined, RUNG.configs(joined)[0]).programs
    assert compile_program(kernel, "sm_90a").resources.spill_bytes == 0
