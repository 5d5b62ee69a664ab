"""conv2d_input_gradient: its problem, its classes of pixels, what it refuses, and conv2d's gradient in autograd."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade import tune
from escalade.device.nvrtc import compile_program
from escalade.device.recipe import Buffer, Im2colMap, KernelCall, Recipe, Workspace
from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Order
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, conv2d, conv2d_input_gradient
from escalade.ops.accuracy import relative_error
from escalade.ops.conv2d import Conv2d, Conv2dProblem
from escalade.ops.conv2d.hopper_persistent import PersistentConfig
from escalade.ops.conv2d_input_gradient import Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.classes import axes, pixel_classes
from escalade.tune import choose
from tests.support import Sample, check

CPU = torch.device("cpu")
OPERATION = OPERATIONS["conv2d_input_gradient"]
NAMES = tuple(rung.name for rung in OPERATION.ladder)
parse = Conv2dInputGradientProblem.parse


def half(name: str, dtype: str = "fp16") -> Conv2dInputGradientProblem:
    return parse(name, dtype, "nhwc")


def tensors(
    *,
    stride: int = 1,
    dtype: torch.dtype = torch.float32,
    size: int = 9,
    channels: int = 8,
    filters: int = 16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and a gradient of y, for a 3x3 filter with padding 1."""
    generator = torch.Generator().manual_seed(stride)
    x = torch.randn(2, channels, size, size, generator=generator)
    weight = torch.randn(filters, channels, 3, 3, generator=generator) / (9 * channels) ** 0.5
    gradient = torch.randn(F.conv2d(x, weight, None, stride, 1).shape, generator=generator)
    return x.to(dtype), weight.to(dtype), gradient.to(dtype)


def expected_gradient(
    x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor, **options: Any
) -> torch.Tensor:
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(F.conv2d(x, weight, **options), x, gradient)[0]


# --- the problem


def test_names_and_sizes() -> None:
    problem = parse("8to16_9x7_k3s2_b2_mask", "fp16", "nhwc")
    forward = Conv2dProblem(2, 8, 9, 7, 16, 3, 3, (2, 2), (1, 1), dtype="fp16", layout="nhwc")
    assert problem == Conv2dInputGradientProblem(forward, mask=True)
    assert problem.name == "8to16_9x7_k3s2_b2_mask"
    assert replace(problem, dtype="fp32", layout="nchw") == parse("8to16_9x7_k3s2_b2_mask")
    assert replace(problem, dtype="fp32").forward.dtype == "fp32"
    assert problem.flops == forward.flops
    assert problem.bytes == 2 * (forward.output_elements + 16 * 8 * 9 + 2 * forward.input_elements)
    assert problem.depth == 16 * 9 / 4


@pytest.mark.parametrize(
    ("name", "sentence"), [("64to64", "the form is"), ("8to8_9_k3s1_b1_relu", "has an epilogue")]
)
def test_names_of_nothing(name: str, sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        parse(name)


def test_fp8_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="dtype 'fp8'"):
        parse("64to64_9_k3s1_b1", "fp8", "nhwc")


# --- classes of pixels


@pytest.mark.parametrize("dilation", [1, 2, 3, 4])
@pytest.mark.parametrize("stride", [1, 2, 3, 4])
def test_classes_meet_every_tap_that_meets_them(stride: int, dilation: int) -> None:
    for size, taps, padding in product((1, 5, 8, 12), (1, 2, 3, 4, 7), range(4)):
        if size + 2 * padding > dilation * (taps - 1):  # otherwise the filter does not fit
            _check_classes(size, taps, stride, padding, dilation)


def _check_classes(size: int, taps: int, stride: int, padding: int, dilation: int) -> None:
    """One dimension by hand: pixel, tap and the row of y where they meet, each such triple once."""
    rows = (size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
    meetings = (
        (row * stride + tap * dilation - padding, tap, row) for row in range(rows) for tap in range(taps)
    )
    found, pixels = [], []
    for axis in axes(size, rows, taps, stride, padding, dilation):
        assert axis.shift >= 0 and axis.padding >= 0
        assert not axis.taps or axis.shift + axis.count <= axis.padded_count
        for i in range(axis.count):
            pixel = axis.offset + i * stride
            pixels.append(pixel)
            for backwards in range(axis.taps):
                tap = axis.first + (axis.taps - 1 - backwards) * axis.step
                row = i + axis.corner + backwards * axis.dilation
                if 0 <= row < rows:
                    found.append((pixel, tap, row))
    assert sorted(found) == sorted(meeting for meeting in meetings if 0 <= meeting[0] < size)
    assert sorted(pixels) == list(range(size))


def test_the_classes_of_a_resnet() -> None:
    taps = [one.taps for one in pixel_classes(parse("64to128_56_k3s2_b1").forward)]
    assert taps == [1, 2, 2, 4]
    assert [one.taps for one in pixel_classes(parse("64to128_56_k1s2_b1").forward)] == [1, 0, 0, 0]
    (only,) = pixel_classes(parse("64to64_56_k3s1_b1").forward)
    assert only.whole and only.convolution.name == "64to64_56_k3s1_b1"
    assert [one.whole for one in pixel_classes(parse("8to8_6_k1s1p2_b1").forward)] == [False]


def test_a_recipe_over_other_buffers() -> None:
    problem = Conv2dProblem.square(64, 64, 9, 3, dtype="fp16", layout="nhwc")
    rung = Conv2d.ladder.rung("producer_consumer")
    moved = rung.recipe(problem, rung.configs(problem)[0]).over(
        {"x": Buffer("gradient", 32), "y": Buffer("z")}, 2
    )
    (call,) = moved.steps
    assert isinstance(call, KernelCall) and call.lane == 2
    pixels = call.arguments[0]
    assert isinstance(pixels, Im2colMap) and pixels.buffer == Buffer("gradient", 32)
    assert Buffer("z") in call.arguments and Buffer("residual", optional=True) in call.arguments
    spaces = Recipe((), (Workspace("parts", 4), Workspace("others", 8))).over({"parts": Buffer("parts3")})
    assert [space.name for space in spaces.workspaces] == ["parts3", "others"]


# --- rungs


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    "name",
    [
        "128to64_5x7_k3s1_b3_mask",
        "72to136_6x5_k3s2_b2_mask",  # slabs and tiles that are not full
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
def test_every_tile_is_placed(name: str, seed: int) -> None:
    """Through shared memory, where masks arrive, and straight from registers."""
    problem, rung = half(name), OPERATION.ladder.rung("persistent")
    configs = rung.configs(problem)
    assert {config.as_dict()["buffers"] for config in configs} > {0, 1}
    for config in configs:
        check(OPERATION, rung, problem, config, CPU, seed)


def test_every_tile_takes_the_filter_as_it_lies_or_turned_around(seed: int) -> None:
    """Filters as rows and as columns of the product, blocks and warpgroups that share a sum, tiles of 32 channels."""
    problem, rung = half("72to136_5x4_k3s1_b2_mask"), OPERATION.ladder.rung("persistent")
    configs = [
        config
        for config in rung.configs(problem)
        if isinstance(config, PersistentConfig) and config.splits <= 3
    ]
    assert {config.swapped for config in configs if config.takes_turned} == {False, True}
    assert {config.share for config in configs if config.takes_turned} > {"turns", "depth"}
    for config in configs:
        assert len(rung.recipe(problem, config).steps) == (1 if config.takes_turned else 2)
        check(OPERATION, rung, problem, config, CPU, seed)


@pytest.mark.parametrize(
    ("rung", "name", "dtype", "flips"),
    [
        ("persistent", "64to64_9_k3s2_b2", "bf16", False),
        ("window", "64to64_9_k3s2_b2", "fp16", False),
        ("streamed_window", "64to64_9_k3s2_b2", "bf16", False),
        ("persistent", "67to64_9_k3s2_b2", "fp16", True),  # channels that no copy divides
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
    assert straight("128to128_28_k3s9x1_b256") == {True}  # longer steps than the copy engine makes
    assert straight("67to64_28_k3s1_b256") == {True}  # rows of results that no copy divides
    assert any(config.as_dict()["splits"] > 1 for config in rung.configs(half("512to512_7_k3s1_b8")))


WINDOWED = [
    ("window", "64to64_9x7_k3s1_b2_mask"),
    ("window", "128to64_9x8_k3s2_b1_mask"),  # windows that end beyond one side, classes of two sizes
    ("window", "64to64_4_k1s1p2_b1_mask"),  # windows that begin inside the image
    ("window", "64to64_7x10_k2s3x1_b1_mask"),
    ("window", "64to64_9x11_k3s2p2d2_b2"),
    ("streamed_window", "64to128_5x7_k3s1_b2_mask"),
    ("streamed_window", "128to72_9x7_k3s2_b2_mask"),  # a slab that is not full
    ("streamed_window", "64to72_6x7_k1s2_b2_mask"),
    ("streamed_window", "64to256_3_k3s1_b1_mask"),  # blocks of a cluster share the filters
]


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("rung", "name"), WINDOWED)
def test_windows_on_odd_sizes(rung: str, name: str, dtype: str, seed: int) -> None:
    problem, one = half(name, dtype), OPERATION.ladder.rung(rung)
    check(OPERATION, one, problem, one.configs(problem)[0], CPU, seed)


@pytest.mark.parametrize(
    "name",
    [
        "64to36_5x7_k3s1_b2_mask",  # a slab that is not full
        "128to32_9x8_k3s2_b2_mask",
        "64to36_6x7_k1s2_b2_mask",
    ],
)
def test_tf32_is_masked_and_placed_by_the_product(name: str, seed: int) -> None:
    problem, rung = half(name, "tf32"), OPERATION.ladder.rung("streamed_window")
    check(OPERATION, rung, problem, rung.configs(problem)[0], CPU, seed)


@pytest.mark.parametrize(
    "name",
    [
        "40to24_5x7_k3s1_b2_mask",
        "67to6_9x8_k3s2_b2_mask",  # filters that no copy divides, an odd row of results
        "24to72_6x7_k1s2_b2_mask",
        "8to8_4_k1s1p2_b1_mask",  # windows that begin inside the image
    ],
)
def test_fp32_is_masked_and_placed_by_the_product(name: str, seed: int) -> None:
    problem, rung = half(name, "fp32"), OPERATION.ladder.rung("wgmma_split")
    for config in rung.configs(problem):
        check(OPERATION, rung, problem, config, CPU, seed)


@pytest.mark.parametrize("scale", [1e-37, 1e-30, 1e-6, 1.0, 1e5, 1e30])
def test_gradients_of_any_magnitude_take_one_attempt(scale: float, seed: int) -> None:
    """In fp32: the first attempt has samples to go by, also where the largest is 50 times as large."""
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


@pytest.mark.parametrize("name", ["64to64_9x11_k3s1_b1_mask", "64to64_9x11_k3s2_b1_mask"])
@pytest.mark.parametrize("rung", ["window", "streamed_window"])
def test_windows_of_every_config(rung: str, name: str, seed: int) -> None:
    problem, one = half(name), OPERATION.ladder.rung(rung)
    for config in one.configs(problem):
        check(OPERATION, one, problem, config, CPU, seed)


def test_the_blocks_of_a_cluster_share_sums_only_where_results_lie_together() -> None:
    rung = OPERATION.ladder.rung("streamed_window")

    def splits(name: str) -> set[int]:
        return {config.as_dict()["splits"] for config in rung.configs(half(name))}

    assert splits("64to256_7_k3s1_b1") - {1}
    assert splits("64to256_7_k3s2_b1") == {1}


@pytest.mark.parametrize("rung", ["tensor_core", "persistent", "window", "streamed_window"])
def test_classes_do_not_touch_each_other(rung: str, seed: int) -> None:
    problem = half("64to64_5x6_k3s2_b1_mask")
    one = OPERATION.ladder.rung(rung)
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    check(OPERATION, one, problem, one.configs(problem)[0], CPU, seed, options)


@pytest.mark.parametrize("rung", NAMES)
def test_nan_reaches_what_it_meets_and_the_mask_stops_it(rung: str) -> None:
    """As in PyTorch: nothing passes where the mask is not positive, everything where it is NaN."""
    split = rung.endswith("_split")
    dtype = torch.float32 if split or rung == "implicit_gemm" else torch.float16
    channels = 64
    gradient = torch.ones(1, channels, 4, 4, dtype=dtype).contiguous(memory_format=torch.channels_last)
    weight = torch.ones(channels, channels, 1, 1, dtype=dtype).contiguous(memory_format=torch.channels_last)
    mask = torch.ones(1, channels, 4, 4, dtype=dtype).contiguous(memory_format=torch.channels_last)
    gradient[0, 5, 1, 2] = torch.nan
    gradient[0, 5, 2, 2] = torch.inf
    mask[0, :32, 1, 2] = 0
    mask[0, 32, 3, 3], mask[0, 33, 3, 3], mask[0, 34, 3, 3] = torch.nan, -1, -0.0
    dx = conv2d_input_gradient(gradient, weight, (4, 4), mask, rung=rung)
    expected = torch.full((1, channels, 4, 4), float(channels), dtype=dtype)
    expected[0, 32:, 1, 2] = torch.nan
    # Split operands make NaN of an infinity.
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
    assert "no tap" in (rung.supports(parse("1to1_1_k1s3p1_b1")) or "")
    assert "rows of pixels in 32 bits" in (rung.supports(parse("64to1_56x1_k1s2_b1000000")) or "")


def test_the_choice() -> None:
    def rung(problem: Conv2dInputGradientProblem) -> str:
        return choose("conv2d_input_gradient", problem, CPU).rung.name

    assert rung(half("64to64_56_k3s1_b256_mask")) == "window"
    assert rung(half("128to128_28_k3s1_b8")) == "streamed_window"
    assert rung(half("256to256_14_k3s1_b256_mask")) == "persistent"
    assert rung(half("128to128_28_k3s2_b256", "tf32")) == "streamed_window"
    assert rung(half("128to128_28_k3s1_b256", "tf32")) == "tma_wgmma"
    assert rung(half("3to12_28_k3s1_b256")) == "tensor_core"
    assert rung(half("128to128_28_k3s1_b256", "fp32")) == "wgmma_split"
    assert rung(half("128to4_28_k3s1_b256", "fp32")) == "implicit_gemm"
    assert rung(half("128to128_28_k3s1g4_b256")) == "direct"
    assert rung(parse("128to128_28_k3s1_b256", "fp32", "nchw")) == "implicit_gemm"
    assert choose("conv2d_input_gradient", parse("128to128_28_k3s1_b2", "fp16"), CPU).problem.layout == "nhwc"


@pytest.mark.parametrize(
    ("rung", "name", "configs"),
    [
        ("persistent", "128to128_28_k3s1_b256_mask", 3),
        ("persistent", "64to128_56_k3s2_b256_mask", 3),
        ("window", "64to64_56_k3s1_b256_mask", 2),
        ("window", "128to64_56_k3s2_b32_mask", 1),
        ("streamed_window", "256to256_14_k3s1_b256_mask", 2),
        ("streamed_window", "64to128_56_k3s2_b256_mask", 1),
        ("wgmma_split", "64to128_56_k3s2_b256_mask", 2),
    ],
)
def test_no_config_spills(rung: str, name: str, configs: int, sample: Sample) -> None:
    problem, one = half(name, "fp32" if rung == "wgmma_split" else "fp16"), OPERATION.ladder.rung(rung)
    for config in sample(one.configs(problem), configs):
        for program in one.recipe(problem, config).programs:
            assert compile_program(program, "sm_90a").resources.spill_bytes == 0, config


# --- as an operator


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_is_pytorchs_gradient(dtype: torch.dtype, stride: int, layout: torch.memory_format) -> None:
    x, weight, gradient = tensors(stride=stride, dtype=dtype)
    dx = conv2d_input_gradient(
        gradient.contiguous(memory_format=layout), weight, (9, 9), x, stride=stride, padding=1
    )
    wide = expected_gradient(x.float(), weight.float(), gradient.float(), stride=stride, padding=1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    torch.testing.assert_close(dx.float(), wide * (x > 0), rtol=tolerance, atol=tolerance)
    assert dx.is_contiguous(memory_format=layout)


def test_every_run_gives_the_same_bits_whatever_the_strides() -> None:
    _, weight, gradient = tensors(stride=2)
    first, again = (
        conv2d_input_gradient(one, weight, (9, 9), stride=2, padding=1)
        for one in (gradient, gradient.repeat_interleave(2, 3)[..., ::2])
    )
    assert torch.equal(first, again)


def test_size_tells_images_apart_that_have_the_same_output() -> None:
    gradient, weight = torch.ones(1, 2, 3, 3), torch.ones(2, 1, 3, 3)
    for size in (7, 8):
        dx = conv2d_input_gradient(gradient, weight, (size, size), stride=2)
        assert dx.shape == (1, 1, size, size)
        assert torch.equal(dx, expected_gradient(torch.zeros(1, 1, size, size), weight, gradient, stride=2))


@pytest.mark.parametrize(
    ("arguments", "options", "sentence"),
    [
        ((torch.ones(2, 16, 9), torch.ones(16, 8, 3, 3), (9, 9)), {}, "gradient has 3 dimensions"),
        ((torch.ones(2, 16, 7, 7), torch.ones(16, 8, 3, 3), (9, 9, 9)), {}, "size 3 numbers"),
        ((torch.ones(2, 16, 7, 7).double(), torch.ones(16, 8, 3, 3), (9, 9)), {}, "torch.float64.*float32"),
        ((torch.ones(2, 16, 7, 7), torch.ones(16, 8, 3, 3).half(), (9, 9)), {}, "weight torch.float16"),
        (
            (torch.ones(2, 8, 7, 7), torch.ones(16, 8, 3, 3), (9, 9)),
            {},
            "8 channels, but weight .* 16 filters",
        ),
        ((torch.ones(2, 16, 9, 9), torch.ones(16, 8, 3, 3), (9, 9)), {}, r"must be \(2, 16, 7, 7\)"),
        ((torch.ones(2, 16, 7, 7), torch.ones(16, 8, 3, 3), (2, 9)), {}, "the filter reaches over 3x3"),
        (
            (torch.ones(2, 16, 7, 7), torch.ones(16, 8, 3, 3), (9, 9), torch.ones(2, 8, 7, 7)),
            {},
            r"mask has shape .* \(2, 8, 9, 9\)",
        ),
        ((torch.ones(2, 16, 7, 7), torch.ones(16, 8, 3, 3), (9, 9)), {"groups": 0}, "groups=0"),
        ((torch.ones(2, 16, 7, 7), torch.ones(16, 8, 3, 3), (9, 9)), {"stride": (1, 1, 1)}, "stride of"),
        ((torch.ones(2, 16, 7, 7), torch.ones(16, 8, 3, 3), (9, 9)), {"rung": "nonsense"}, "it has direct"),
        (
            (torch.ones(2, 16, 7, 7).half(), torch.ones(16, 8, 3, 3).half(), (9, 9)),
            {"tf32": True},
            "tf32=True",
        ),
    ],
)
def test_what_poses_no_problem(arguments: tuple[Any, ...], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        conv2d_input_gradient(*arguments, **options)


def test_an_empty_batch() -> None:
    assert conv2d_input_gradient(torch.ones(0, 16, 7, 7), torch.ones(16, 8, 3, 3), (9, 9)).shape == (
        0,
        8,
        9,
        9,
    )
    with pytest.raises(UnsupportedError, match="no rung 'nonsense'"):
        conv2d_input_gradient(torch.ones(0, 16, 7, 7), torch.ones(16, 8, 3, 3), (9, 9), rung="nonsense")


def test_pytorch_knows_the_operator() -> None:
    x, weight, gradient = tensors(stride=2)
    arguments = (
        gradient.requires_grad_(), weight.requires_grad_(), [9, 9], x, [2, 2], [1, 1], [1, 1], 1, False, None,
    )  # fmt: skip
    torch.library.opcheck(torch.ops.escalade.conv2d_input_gradient.default, arguments)


def test_it_has_gradients_of_its_own() -> None:
    x, weight, gradient = tensors(stride=2)

    def penalty(ours: bool) -> list[torch.Tensor]:
        grad_y, w = gradient.clone().requires_grad_(), weight.clone().requires_grad_()
        if ours:
            dx = conv2d_input_gradient(grad_y, w, (9, 9), x, stride=2, padding=1)
        else:
            dx = F.conv_transpose2d(grad_y, w, None, 2, 1) * (x > 0)
        return list(torch.autograd.grad(dx.square().sum(), (grad_y, w)))

    for mine, its in zip(penalty(True), penalty(False), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-4)


def test_conv2d_goes_back_through_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of x is ours where there is more than `direct`, and PyTorch's where there is not."""
    made = []

    def noting(operation: str, *rest: Any) -> Any:
        made.append(operation)
        return choose(operation, *rest)

    monkeypatch.setattr(tune, "choose", noting)
    for groups, ours in ((1, True), (4, False)):
        made.clear()
        x = torch.randn(1, 8, 7, 10 + groups, requires_grad=True)  # of a size that no other test has
        weight = torch.randn(8, 8 // groups, 3, 3)
        y = conv2d(x, weight, padding=1, groups=groups)
        gradient = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, gradient)
        expected = expected_gradient(x, weight, gradient, padding=1, groups=groups)
        torch.testing.assert_close(dx, expected, rtol=1e-4, atol=1e-4)
        assert ("conv2d_input_gradient" in made) == ours
