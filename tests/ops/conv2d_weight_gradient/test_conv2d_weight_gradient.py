"""conv2d_weight_gradient: its problem, odd sizes, the bias gradient, refusals, and conv2d's gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade.device.nvrtc import compile_program
from escalade.device.recipe import KernelCall
from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Order
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, conv2d, conv2d_weight_gradient
from escalade.ops.base.card import H200, HOPPER_SHARED
from escalade.ops.choose.choice import choose
from escalade.ops.conv2d import Conv2dProblem
from escalade.ops.conv2d_weight_gradient import Conv2dWeightGradientProblem, reference
from escalade.ops.conv2d_weight_gradient.rungs.depthwise import DEPTHWISE, DepthwiseConfig
from escalade.ops.conv2d_weight_gradient.rungs.depthwise_tile import (
    DEPTHWISE_STAGED,
    DEPTHWISE_TILE,
    TileConfig,
)
from escalade.ops.conv2d_weight_gradient.rungs.parts import SplitWork
from escalade.ops.conv2d_weight_gradient.rungs.sm90_few_channels import FEW_CHANNELS
from escalade.ops.conv2d_weight_gradient.rungs.sm90_halves import WGMMA_SPLIT, WINDOW_SPLIT
from escalade.ops.conv2d_weight_gradient.rungs.sm90_wgmma import TILES, WGMMA, WgmmaConfig
from escalade.ops.conv2d_weight_gradient.rungs.sm90_window import WINDOW, WindowConfig
from escalade.ops.conv2d_weight_gradient.rungs.tensor_core import TENSOR_CORE
from tests import formulas
from tests.support import Sample, check

CPU = torch.device("cpu")
OPERATION = OPERATIONS["conv2d_weight_gradient"]
MOST_CHANNELS = {"few_channels": 8, "skinny": 4, "wgmma_groups": 64}
"""The most channels that rungs for few support, and a problem whose groups are multiples of 16 bytes."""
DTYPE = dict.fromkeys(("atomics", "shared_sums", "wgmma_split", "window_split"), torch.float32)
"""The dtype for rungs without fp16."""
NAMES = tuple(rung.name for rung in OPERATION.ladder)
each_fast_rung = pytest.mark.parametrize("rung", [WGMMA, WINDOW], ids=lambda rung: rung.name)


each_tiled_rung = pytest.mark.parametrize(
    "rung", [DEPTHWISE_STAGED, DEPTHWISE_TILE], ids=lambda rung: rung.name
)


def half(name: str, dtype: str = "fp16") -> Conv2dWeightGradientProblem:
    return replace(Conv2dWeightGradientProblem.parse(name), dtype=dtype, layout="nhwc")


LARGE = half("64to64_56_k3s1_b256")


def tensors(
    *sizes: int, filters: int, stride: int = 1, dtype: torch.dtype = torch.float16, size: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    """x in channels_last, and a gradient of its convolution with padding 1 that is stored the same way."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(sizes, generator=generator)
    y = F.conv2d(x, torch.zeros(filters, sizes[1], size, size), None, stride, 1)
    gradient = torch.randn(y.shape, generator=generator)
    layout = torch.channels_last
    return x.to(dtype).contiguous(memory_format=layout), gradient.to(dtype).contiguous(memory_format=layout)


def expected(
    x: torch.Tensor, gradient: torch.Tensor, stride: int = 1, size: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    weight = torch.zeros(gradient.shape[1], x.shape[1], size, size, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(gradient.shape[1], dtype=torch.float64, requires_grad=True)
    y = F.conv2d(x.double(), weight, bias, stride, 1)
    of_weight, of_bias = torch.autograd.grad(y, (weight, bias), gradient.double())
    return of_weight, of_bias


def in_groups(gradient: torch.Tensor, groups: int) -> torch.Tensor:
    """Return the diagonal blocks of the gradient of all weights."""
    filters, channels = (size // groups for size in gradient.shape[:2])
    blocks = (slice(group * channels, (group + 1) * channels) for group in range(groups))
    return torch.cat([part[:, block] for part, block in zip(gradient.split(filters), blocks, strict=True)])


def groups_of(rung: str, channels: int) -> int:
    """Return the groups for testing a rung."""
    return {
        "depthwise": channels,
        "depthwise_staged": channels,
        "depthwise_tile": channels,
        "wgmma_groups": 4,
    }.get(rung, 1)


def assert_close(result: torch.Tensor, right: torch.Tensor) -> None:
    """The tolerance for the result's rounding and fp32 sums."""
    rounding = torch.finfo(result.dtype).eps
    torch.testing.assert_close(result.double(), right, rtol=rounding, atol=1e-5 * float(right.abs().max()))


# --- the problem


def test_names_and_sizes() -> None:
    problem = Conv2dWeightGradientProblem.parse("8to16_9x7_k3s2_b2_bias")
    assert problem.name == "8to16_9x7_k3s2_b2_bias"
    assert problem.part_elements == 8 * 16 * 9 + 16
    assert problem.flops == 2 * (2 * 5 * 4) * 16 * 8 * 9
    assert problem.bytes == 4 * (2 * 8 * 63 + 2 * 16 * 20 + 8 * 16 * 9 + 16)
    moved = replace(problem, dtype="fp16", layout="nhwc")
    assert (moved.forward.dtype, moved.forward.layout) == ("fp16", "nhwc") == (moved.dtype, moved.layout)
    assert replace(moved, dtype="fp32", layout="nchw") == problem


@pytest.mark.parametrize("changes", [{"relu": True}, {"residual": True}, {"dtype": "fp8"}])
def test_a_problem_is_of_the_convolution_alone(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError):
        Conv2dWeightGradientProblem(replace(Conv2dProblem.square(8, 8, 9, 3), **changes))


def test_parts_fill_the_card_in_whole_waves() -> None:
    work = SplitWork(tiles=3, pieces=1000, cycles=1000.0, slots=132, elements=1000, card=H200)
    assert work.best() == 23  # 44 splits of 3 tiles are 132 CTAs
    assert replace(work, cycles=1.0, elements=10**7).best() > 23  # adding up takes longer
    assert replace(work, tiles=400, pieces=1).best() == 1
    assert work.best(most=9) == 8  # 132 splits in three full waves; 112 would be enough


# --- results

ODD = (
    "64to64_5x4_k3s1_b3",
    "72to40_6x5_k3s2_b17_bias",
    "128to64_4_k3s1p0_b2",
    "8to8_2x3_k3s1p2_b1_bias",
    "64to128_7x8_k3s2p0_b2",
)


@pytest.mark.share(7)
@each_fast_rung
@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_odd_sizes(rung: Any, name: str, dtype: str, seed: int) -> None:
    problem = half(name, dtype)
    check(OPERATION, rung, problem, rung.configs(problem)[0], CPU, seed)


@pytest.mark.parametrize("part_slabs, lanes", [(5, 1), (2, 4), (1, 8)])
def test_few_and_many_parts_are_added_up(part_slabs: int, lanes: int, seed: int) -> None:
    """36 k-tiles: a thread adds all of few splits, and every n-th of many."""
    problem = half("8to8_16x16_k1s1_b9_bias")
    config = WgmmaConfig(64, 64, 1, 2, 3, part_slabs)
    total = WGMMA.recipe(problem, config).steps[-1]
    assert isinstance(total, KernelCall) and ("LANES", lanes) in total.program.constants
    check(OPERATION, WGMMA, problem, config, CPU, seed)


@pytest.mark.parametrize(
    ("rung", "pieces"),
    [(WGMMA, "part_slabs"), (TENSOR_CORE, "part_tiles")],
    ids=lambda value: getattr(value, "name", ""),
)
def test_one_part_is_the_result(rung: Any, pieces: str, seed: int) -> None:
    """One launch, also if the gradient of the bias is not requested."""
    problem = half("8to24_5x6_k1s1_b2_bias")
    config = replace(rung.configs(problem)[0], **{pieces: 9})
    recipe = rung.recipe(problem, config)
    assert len(recipe.steps) == 1 and not recipe.workspaces
    check(OPERATION, rung, problem, config, CPU, seed)
    inputs, y = OPERATION.inputs(problem, CPU, seed), OPERATION.output(problem, CPU)
    bind(recipe, {**inputs, "y": y}, problem.name)()
    assert_close(y, OPERATION.reference(problem, inputs))


@pytest.mark.parametrize(
    "rung, most, config",
    [(WGMMA_SPLIT, 16, WgmmaConfig(64, 64, 1, 2, 3, 64)), (WINDOW_SPLIT, 32, WindowConfig(2, 5, 64))],
    ids=lambda value: getattr(value, "name", ""),
)
def test_tensor_cores_add_up_few_upper_halves_in_fp32(rung: Any, most: int, config: Any, seed: int) -> None:
    """128 products in one split of those with a lower half, in at least two of the upper halves."""
    problem = half("8to8_8x16_k3s1_b16_bias", "fp32")
    *_, upper_lower, upper, lower_upper, _ = rung.recipe(problem, config).steps
    assert all(isinstance(step, KernelCall) for step in (upper_lower, upper, lower_upper))
    assert upper_lower.grid[1] == lower_upper.grid[1] == 1 < 2 <= upper.grid[1]
    assert upper.arguments[-1] <= most
    (one,) = rung.recipe(replace(problem, dtype="tf32"), config).steps[2:-1]
    assert one.grid[1] == 1
    check(OPERATION, rung, problem, config, CPU, seed)


@pytest.mark.share(7)
@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.filters}x{tile.columns}")
def test_every_tile_and_several_slabs_a_part(tile: WgmmaConfig, seed: int) -> None:
    check(OPERATION, WGMMA, half("72to264_9x8_k2x1s1p0_b5_bias"), replace(tile, part_slabs=3), CPU, seed)


@pytest.mark.share(7)
@pytest.mark.parametrize("rows", [1, 2, 3, 6])
@pytest.mark.parametrize("columns", [1, 4, 7, 100])
def test_parts_begin_and_end_within_strips(rows: int, columns: int, seed: int) -> None:
    check(OPERATION, WINDOW, half("64to64_6x5_k3s1_b20_bias"), WindowConfig(rows, 5, columns), CPU, seed)


@each_fast_rung
@pytest.mark.parametrize("name", ["64to64_4x5_k3s1_b3_bias", "64to64_5x9_k3s2_b2_bias"])
def test_stages_are_reused_without_a_race(rung: Any, name: str, seed: int) -> None:
    """Copies and products as late as allowed."""
    problem = half(name)
    config = WgmmaConfig(64, 128, 1, 2, 2, 4) if rung is WGMMA else WindowConfig(1, 4, 9)
    check(
        OPERATION,
        rung,
        problem,
        config,
        CPU,
        seed,
        TwinOptions(order=Order(seed=seed, late=True), checks=True),
    )


@pytest.mark.share(7)
@pytest.mark.parametrize("rung", NAMES)
@pytest.mark.parametrize("stride", [1, 2])
def test_the_gradients_of_weights_and_bias(rung: str, stride: int) -> None:
    dtype = DTYPE.get(rung, torch.float16)
    channels = MOST_CHANNELS.get(rung, 72)
    groups = groups_of(rung, channels)
    filters = {1: 136, channels: channels}.get(groups, 48)
    x, gradient = tensors(3, channels, 7, 6, filters=filters, stride=stride, dtype=dtype)
    given: dict[str, Any] = {"stride": stride, "padding": 1, "groups": groups, "rung": rung}
    of_weight, of_bias = conv2d_weight_gradient(x, gradient, 3, bias=True, **given)
    right_weight, right_bias = expected(x, gradient, stride)
    assert of_bias is not None and of_bias.dtype == of_weight.dtype == dtype
    assert of_weight.is_contiguous(memory_format=torch.channels_last)
    assert_close(of_weight, in_groups(right_weight, groups))
    assert_close(of_bias, right_bias)
    again = conv2d_weight_gradient(x, gradient, 3, **given)
    assert again[1] is None
    if rung not in ("atomics", "shared_sums"):
        assert torch.equal(again[0], of_weight)


@pytest.mark.parametrize("rung", NAMES)
def test_nan_reaches_what_sees_it_and_nothing_else(rung: str) -> None:
    """A corner of the image, which the last row and column of taps do not cover; and one channel of a gradient."""
    channels = 16 if rung.startswith("depthwise") else MOST_CHANNELS.get(rung, 8)
    groups = groups_of(rung, channels)
    x, gradient = tensors(18, channels, 4, 4, filters=16, dtype=DTYPE.get(rung, torch.float16))
    x[0, 3, 0, 0], x[17, 1, 3, 3], gradient[16, 9, 2, 1] = torch.nan, torch.inf, torch.nan
    of_weight, of_bias = conv2d_weight_gradient(
        x, gradient, 3, padding=1, groups=groups, bias=True, rung=rung
    )
    right_weight, right_bias = formulas.weight_gradient(x, gradient, 3, 1, 1)
    assert torch.equal(of_weight.isfinite(), in_groups(right_weight, groups).isfinite())
    assert of_bias is not None and torch.equal(of_bias.isnan(), right_bias.isnan())


def test_a_walk_down_a_depthwise_column_keeps_the_stride(seed: int) -> None:
    """Several rows at a time, which do not divide the image, and several columns one after another."""
    problem = half("8to8_13x5_k3s2p1d1x2g8_b2_bias")
    for config in (DepthwiseConfig(8, 4, 1, 5), DepthwiseConfig(4, 4, 2, 1, part_rounds=2)):
        check(OPERATION, DEPTHWISE, problem, config, CPU, seed)


@each_tiled_rung
def test_a_cta_adds_up_tiles_of_several_images(rung: Any, seed: int) -> None:
    """More tiles than stages, and a last CTA with fewer than the others."""
    for name in ("24to24_11x9_k3s1g24_b3_bias", "16to16_9x14_k5x3s2x1p1x0g16_b2"):
        for config in (TileConfig(16, 4, 1, 3, 2, rounds=7), TileConfig(8, 2, 3, 2, 3, rounds=4)):
            check(OPERATION, rung, half(name), config, CPU, seed)


@pytest.mark.parametrize("channels", [2, 6, 20])
def test_copies_are_as_wide_as_the_channels_allow(channels: int, seed: int) -> None:
    """4 and 8 bytes, and channels beyond the last in a CTA."""
    problem = half(f"{channels}to{channels}_6x5_k3s2g{channels}_b2_bias")
    check(OPERATION, DEPTHWISE_STAGED, problem, TileConfig(16, 3, 1, 2, 2, rounds=2), CPU, seed)


@each_tiled_rung
def test_infinity_reaches_no_tap_through_the_rest_of_a_tile(rung: Any, seed: int) -> None:
    """A tile that reaches beyond the image, and an infinity in its last corner."""
    problem = half("8to8_5x6_k3s1g8_b1")
    inputs = OPERATION.inputs(problem, CPU, seed)
    inputs["x"][0, 0, 4, 5] = torch.inf
    inputs["gradient"].fill_(1.0)
    y = OPERATION.output(problem, CPU)
    bind(rung.recipe(problem, TileConfig(8, 4, 1, 3, 2)), {**inputs, "y": y}, problem.name)()
    assert torch.equal(y.isfinite(), OPERATION.reference(problem, inputs).isfinite()) and not y.isnan().any()


def test_one_bias_may_be_off_by_what_its_rounding_is() -> None:
    """With this seed by more than twice the mean over the weights, which is their bound."""
    problem = replace(Conv2dWeightGradientProblem.parse("8to1_3_k3s1_b1_bias"), dtype="bf16")
    rung = OPERATION.ladder.rung("direct")
    check(OPERATION, rung, problem, rung.configs(problem)[0], CPU, seed=78)


def test_strided_tensors_and_an_empty_batch() -> None:
    x, gradient = tensors(2, 8, 5, 5, filters=8, dtype=torch.float32)
    wide = torch.randn(2, 8, 5, 10)[:, :, :, ::2].copy_(x)
    of_weight, _ = conv2d_weight_gradient(wide, gradient, 3, padding=1)
    assert_close(of_weight, expected(x, gradient)[0])
    of_weight, of_bias = conv2d_weight_gradient(x[:0], gradient[:0], (3, 3), padding=1, bias=True)
    assert of_weight.shape == (8, 8, 3, 3) and not of_weight.any()
    assert of_bias is not None and of_bias.shape == (8,) and not of_bias.any()


# --- refusals


@each_fast_rung
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "fp32"}, "takes fp16, bf16, not fp32"),
        ({"layout": "nchw"}, "layout nhwc"),
        ({"groups": 2}, "groups=1"),
        ({"channels": 36}, "multiples of 8"),
        ({"filters": 36}, "multiples of 8"),
        ({"stride": (9, 9)}, "strides"),
    ],
)
def test_what_is_refused(rung: Any, changes: dict[str, Any], reason: str) -> None:
    assert rung.supports(LARGE) is None
    assert reason in (rung.supports(Conv2dWeightGradientProblem(replace(LARGE.forward, **changes))) or "")


def test_what_only_one_takes() -> None:
    five, dilated = half("64to64_9_k5s1_b2"), half("64to64_9_k3s1d2_b2")
    far = half("64to64_200_k3s1p129_b1")
    assert WGMMA.supports(five) is None and "3x3" in (WINDOW.supports(five) or "")
    assert WGMMA.supports(dilated) is None and "dilation" in (WINDOW.supports(dilated) or "")
    assert WINDOW.supports(far) is None and "corners" in (WGMMA.supports(far) or "")


def test_bad_tensors_are_refused() -> None:
    x, gradient = tensors(2, 8, 5, 5, filters=8)
    for arguments, message in (
        ((x[0], gradient, 3), "x: N C H W"),
        ((x, gradient.float(), 3), "gradient is torch.float32 .*of one dtype"),
        ((x, gradient[:1], 3), "gradient: N K P Q, .* here N is 2"),
        ((x, gradient, 5), "for 8to8_5_k5s1p1_b2 it must be"),
        ((x.int(), gradient.int(), 3), r"x is torch.int32 .*\(float32, float16 or bfloat16\)"),
    ):
        with pytest.raises(UnsupportedError, match=message):
            conv2d_weight_gradient(*arguments, padding=1)
    with pytest.raises(UnsupportedError, match="3 groups"):
        conv2d_weight_gradient(x, gradient, 3, padding=1, groups=3)


# --- the choice


def test_sixteen_images_at_a_time_are_preferred_where_there_are_so_many() -> None:
    assert choose(OPERATION, LARGE, CPU).rung is WINDOW
    assert choose(OPERATION, half("64to64_56_k3s1_b4"), CPU).rung is WGMMA
    assert choose(OPERATION, half("64to64_56_k1s1_b256"), CPU).rung is WGMMA
    assert choose(OPERATION, half("3to64_224_k7s2_b256"), CPU).rung is FEW_CHANNELS
    assert choose(OPERATION, half("3to60_224_k7s2_b256"), CPU).rung.name == "tensor_core"
    assert choose(OPERATION, half("58to60_28_k1s1_b256"), CPU).rung.name == "tensor_core"
    assert choose(OPERATION, half("256to3_32_k3s1_b256"), CPU).rung.name == "skinny"


def test_other_layouts_are_converted_for_tensor_cores() -> None:
    chosen = choose(OPERATION, replace(LARGE, layout="nchw"), CPU)
    assert chosen.rung is WINDOW and chosen.problem == LARGE
    x, gradient = tensors(2, 16, 5, 4, filters=8)
    of_weight, _ = conv2d_weight_gradient(x.contiguous(), gradient, 3, padding=1)
    assert of_weight.is_contiguous()
    assert_close(of_weight, expected(x, gradient)[0])


@each_fast_rung
def test_the_blocks_of_a_multiprocessor_fit(rung: Any) -> None:
    for problem in (LARGE, half("64to128_56_k3s2_b256")):
        for config in rung.configs(problem):
            call = rung.recipe(problem, config).steps[0]
            assert isinstance(call, KernelCall)
            blocks = config.as_dict().get("blocks_per_sm", 1)
            assert (call.shared_bytes + 1024) * blocks <= HOPPER_SHARED + 1024


@pytest.mark.share(7)
@each_fast_rung
@pytest.mark.parametrize("name", ["64to64_56_k3s1_b256_bias", "64to128_56_k3s2_b256"])
def test_no_config_spills_and_no_product_waits_for_another(rung: Any, name: str, sample: Sample) -> None:
    problem = half(name)
    for config in sample(rung.configs(problem), 1):
        for program in rung.recipe(problem, config).programs:
            compiled = compile_program(program, "sm_90a")
            assert compiled.resources.spill_bytes == 0, config
            assert "serialized" not in compiled.log, config


# --- autograd


def leaves(x: torch.Tensor, filters: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    weight = (0.05 * torch.randn(filters, x.shape[1], 3, 3, generator=generator)).to(x.dtype)
    bias = torch.randn(filters, generator=generator).to(x.dtype)
    return [tensor.detach().clone().requires_grad_() for tensor in (x, weight, bias)]


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_it_is_the_gradient_of_conv2d(layout: torch.memory_format) -> None:
    """For small integers, whose sums are exact in fp16 in any order: PyTorch, which computes some layouts, rounds each
    image's contribution."""
    x, gradient = (tensor.clamp(-4, 4).round() for tensor in tensors(2, 64, 5, 4, filters=64, stride=2))
    x = x.contiguous(memory_format=layout)
    inputs = leaves(x, 64)
    y = conv2d(*inputs, stride=2, padding=1)
    _, of_weight, of_bias = torch.autograd.grad(y, inputs, gradient)
    right_weight, right_bias = expected(x, gradient, 2)
    assert torch.equal(of_weight.double(), right_weight) and of_weight.dtype == x.dtype
    assert torch.equal(of_bias.double(), right_bias)


def test_second_derivatives() -> None:
    """Gradient of a function that is linear in x and in the gradient."""
    x, gradient = tensors(2, 8, 5, 5, filters=8, dtype=torch.float32)
    x, gradient = x.requires_grad_(), gradient.requires_grad_()
    of_weight, of_bias = conv2d_weight_gradient(x, gradient, 3, padding=1, bias=True)
    assert of_bias is not None
    results = torch.autograd.grad((of_weight**2).sum() + (of_bias**2).sum(), (x, gradient))
    problem = Conv2dWeightGradientProblem.parse("8to8_5_k3s1_b2_bias")
    right_weight, right_bias = reference.compute(problem, {"x": x, "gradient": gradient})
    assert right_bias is not None
    right = torch.autograd.grad((right_weight**2).sum() + (right_bias**2).sum(), (x, gradient))
    for result, one in zip(results, right, strict=True):
        torch.testing.assert_close(result, one, rtol=1e-4, atol=1e-3)


def test_it_is_an_operator() -> None:
    x, gradient = tensors(2, 8, 5, 5, filters=8, dtype=torch.float32)
    torch.library.opcheck(
        torch.ops.escalade.conv2d_weight_gradient,
        (x.requires_grad_(), gradient, [3, 3], [1, 1], [1, 1], [1, 1], 1, True),
    )


def test_nothing_is_written_where_nobody_asked_for_the_bias() -> None:
    problem = half("8to16_5_k3s1_b2_bias")
    inputs = OPERATION.inputs(problem, CPU, 0)
    y = OPERATION.output(problem, CPU)
    bind(WGMMA.recipe(problem, WGMMA.configs(problem)[0]), {**inputs, "y": y})()
    assert_close(y, OPERATION.reference(problem, inputs))
