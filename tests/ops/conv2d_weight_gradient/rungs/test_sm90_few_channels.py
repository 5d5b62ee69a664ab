"""conv2d_weight_gradient of few channels: the packing of x, odd sizes, every arrangement, races, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade.device.nvrtc import compile_program
from escalade.device.recipe import KernelCall, TiledMap
from escalade.device.run import TwinOptions
from escalade.device.twin import Order
from escalade.ops import OPERATIONS, conv2d, conv2d_weight_gradient
from escalade.ops.base.card import HOPPER_SHARED
from escalade.ops.choose.choice import choose
from escalade.ops.conv2d_weight_gradient import Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.rungs.sm90_few_channels import (
    FEW_CHANNELS,
    FewChannelsConfig,
    Packing,
)
from tests import formulas
from tests.support import Sample, check

CPU = torch.device("cpu")
OPERATION = OPERATIONS["conv2d_weight_gradient"]


def half(name: str, dtype: str = "fp16") -> Conv2dWeightGradientProblem:
    return replace(Conv2dWeightGradientProblem.parse(name), dtype=dtype, layout="nhwc")


RESNET = half("3to64_224_k7s2_b256")


def gradients(
    x: torch.Tensor, gradient: torch.Tensor, size: int, stride: int, padding: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of weights and bias, by PyTorch in fp64."""
    weight = torch.zeros(gradient.shape[1], x.shape[1], size, size, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(gradient.shape[1], dtype=torch.float64, requires_grad=True)
    y = F.conv2d(x.double(), weight, bias, stride, padding)
    of_weight, of_bias = torch.autograd.grad(y, (weight, bias), gradient.double())
    return of_weight, of_bias


def tensors(channels: int, filters: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x in channels_last, and a gradient of its convolution with 7x7, stride 2 and padding 3."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(2, channels, 11, 21, generator=generator)
    gradient = torch.randn(2, filters, 6, 11, generator=generator)
    return tuple(one.half().contiguous(memory_format=torch.channels_last) for one in (x, gradient))  # type: ignore[return-value]


# --- the packing of x


@pytest.mark.parametrize(
    ("name", "group", "step", "pitch", "boxes", "rows"),
    [
        ("3to64_224_k7s2_b256", 2, 2, 1, 4, 115),  # only rows where a pair of filter rows begins
        ("3to64_32_k3s1_b1", 2, 1, 1, 2, 34),
        ("4to64_32_k4s4p0_b1", 2, 2, 2, 2, 16),
        ("8to64_224_k7s2_b1", 1, 1, 2, 7, 229),
        ("1to64_28_k5s1_b1", 8, 1, 1, 1, 28),
        ("2to64_28_k5s3p0_b1", 4, 1, 3, 2, 26),
    ],
)
def test_rows_share_a_pixel(name: str, group: int, step: int, pitch: int, boxes: int, rows: int) -> None:
    packing = Packing.of(half(name).forward)
    found = (packing.group, packing.row_step, packing.row_pitch, packing.boxes, packing.rows)
    assert found == (group, step, pitch, boxes, rows)


def test_windows_end_within_their_row() -> None:
    """TMA must not read beyond the image either."""
    for name in ("3to64_224_k7s2_b4", "1to8_5x4_k1x8s1p0x4_b1", "8to8_9_k3s3_b3"):
        problem = half(name)
        recipe = FEW_CHANNELS.recipe(problem, FEW_CHANNELS.configs(problem)[0])
        windows = next(a for step in recipe.steps[1:2] for a in step.arguments[1:2])  # type: ignore[union-attr]
        assert isinstance(windows, TiledMap)
        last = sum((n - 1) * stride for n, stride in zip(windows.sizes[1:], windows.strides, strict=True))
        assert last + 128 <= recipe.workspaces[0].bytes


# --- results

ODD = (
    "3to64_11x21_k7s2p3_b2_bias",
    "3to8_5x4_k3s1_b3",
    "1to8_5x4_k1x8s1p0x4_b1_bias",
    "1to24_12x9_k8s1p0_b1",
    "1to8_20x8_k17x3s2_b1",  # three groups of rows
    "2to72_7x33_k5s3p0_b2_bias",
    "4to16_8x17_k2s2p0_b2",
    "5to40_9x6_k3s2_b2_bias",
    "8to136_6x5_k3s1_b2_bias",
    "7to8_13x9_k7s2p3_b1",
    "3to8_3x3_k1s1p2_b1_bias",  # windows of zeros only
    "8to8_16x4_k13x1s1p6x0_b1",  # two tiles of columns
    "6to16_6x18_k3x2s4x3p1x0_b2",
)


@pytest.mark.share(7)
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_odd_sizes(name: str, dtype: str, seed: int) -> None:
    problem = half(name, dtype)
    check(OPERATION, FEW_CHANNELS, problem, FEW_CHANNELS.configs(problem)[0], CPU, seed)


@pytest.mark.parametrize("name", ["3to136_13x35_k7s2p3_b2_bias", "8to136_12x9_k5s1_b1_bias"])
def test_every_arrangement_and_several_slabs_a_part(name: str, seed: int, sample: Sample) -> None:
    problem = half(name)
    for config in sample(FEW_CHANNELS.configs(problem), 3):
        assert isinstance(config, FewChannelsConfig)
        check(OPERATION, FEW_CHANNELS, problem, replace(config, part_slabs=3), CPU, seed)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("3to64_12x37_k7s2p3_b2_bias", (1, 1, 4, 3)),
        ("3to128_12x37_k7s2p3_b2_bias", (2, 1, 4, 2)),
        ("8to64_8x20_k3s1_b2", (1, 2, 2, 4)),
    ],
)
def test_stages_are_reused_without_a_race(name: str, shape: tuple[int, int, int, int], seed: int) -> None:
    """Copies and products as late as allowed."""
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    check(OPERATION, FEW_CHANNELS, half(name), FewChannelsConfig(*shape, 2, 5), CPU, seed, options)


@pytest.mark.parametrize("channels", [2, 3, 8])
def test_the_gradients_of_weights_and_bias(channels: int) -> None:
    x, gradient = tensors(channels, 24)
    of_weight, of_bias = conv2d_weight_gradient(
        x, gradient, 7, stride=2, padding=3, bias=True, rung=FEW_CHANNELS.name
    )
    right_weight, right_bias = gradients(x, gradient, 7, 2, 3)
    assert of_bias is not None
    torch.testing.assert_close(of_weight.double(), right_weight, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(of_bias.double(), right_bias, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("channels", [2, 3, 8])
def test_nan_reaches_what_sees_it_and_nothing_else(channels: int) -> None:
    """In the corners, which most taps do not cover, and inside."""
    for n, h, w in ((0, 0, 0), (1, 10, 20), (0, 10, 0), (1, 4, 7)):
        x, gradient = tensors(channels, 8)
        x[n, channels - 1, h, w] = torch.nan
        of_weight, _ = conv2d_weight_gradient(x, gradient, 7, stride=2, padding=3, rung=FEW_CHANNELS.name)
        right, _ = formulas.weight_gradient(x, gradient, 7, 2, 3)
        assert torch.equal(of_weight.isnan(), right.isnan())


def test_it_is_the_gradient_of_a_first_layer() -> None:
    x, gradient = tensors(3, 64)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(64, 3, 7, 7, generator=generator).half().requires_grad_()
    bias = torch.randn(64, generator=generator).half().requires_grad_()
    y = conv2d(x, weight, bias, stride=2, padding=3)
    assert y.grad_fn is not None
    assert choose(OPERATION, half("3to64_224_k7s2p3_b32_bias"), CPU).rung is FEW_CHANNELS
    of_weight, of_bias = torch.autograd.grad(y, (weight, bias), gradient)
    asked = conv2d_weight_gradient(x, gradient, 7, stride=2, padding=3, bias=True)
    assert asked[1] is not None
    assert torch.equal(of_weight, asked[0]) and torch.equal(of_bias, asked[1])


def test_one_channel_lies_as_in_either_layout() -> None:
    """It runs in nchw, with conversions: the image needs none, the gradient does."""
    x, gradient = tensors(1, 64)
    problem = half("1to64_111x121_k7s2p3_b8")
    chosen = choose(OPERATION, replace(problem, layout="nchw"), CPU)
    assert chosen.rung is FEW_CHANNELS and chosen.problem == problem
    of_weight, _ = conv2d_weight_gradient(x, gradient, 7, stride=2, padding=3)
    torch.testing.assert_close(of_weight.double(), gradients(x, gradient, 7, 2, 3)[0], rtol=1e-3, atol=1e-3)


# --- refusals


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "fp32"}, "takes fp16, bf16, not fp32"),
        ({"layout": "nchw"}, "layout nhwc"),
        ({"groups": 3, "filters": 48}, "groups=1"),
        ({"channels": 9}, "up to 8 channels"),
        ({"filters": 60}, "multiples of 8 filters"),
        ({"filter_width": 9}, "8 pixels wide"),
        ({"dilation": (2, 1)}, "without dilation"),
        ({"batch": 2**17}, "32 bits"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], reason: str) -> None:
    assert FEW_CHANNELS.supports(RESNET) is None
    problem = Conv2dWeightGradientProblem(replace(RESNET.forward, **changes))
    assert reason in (FEW_CHANNELS.supports(problem) or "")


# --- on the card


@pytest.mark.parametrize(
    "name",
    ["3to64_224_k7s2_b256", "8to64_64_k7s2_b32", "1to8_300_k250x8s1p0_b1", "1to8_40_k16x3s9_b1"],
)
def test_the_blocks_of_a_multiprocessor_fit(name: str) -> None:
    problem = half(name)
    configs = FEW_CHANNELS.configs(problem)
    assert configs
    for config in configs:
        assert isinstance(config, FewChannelsConfig)
        call = FEW_CHANNELS.recipe(problem, config).steps[1]
        assert isinstance(call, KernelCall)
        assert (call.shared_bytes + 1024) * config.blocks_per_sm <= HOPPER_SHARED + 1024


@pytest.mark.parametrize("name", ["3to64_224_k7s2_b256_bias", "8to128_56_k7s2_b256_bias"])
def test_no_config_spills_and_no_product_waits_for_another(name: str, sample: Sample) -> None:
    problem = half(name)
    for config in sample(FEW_CHANNELS.configs(problem), 1):
        for program in FEW_CHANNELS.recipe(problem, config).programs:
            compiled = compile_program(program, "sm_90a")
            assert compiled.resources.spill_bytes == 0, config
            assert "serialized" not in compiled.log, config
