"""Gradients of convolutions: images that only fit a GPU, and sums as computed by tensor cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade.ops import OPERATIONS, Rung, conv2d_input_gradient, conv2d_weight_gradient
from escalade.ops.base.accuracy import relative_error
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import STORAGE
from escalade.ops.conv2d import Conv2dProblem
from escalade.ops.conv2d_input_gradient import Conv2dInputGradientProblem
from escalade.ops.conv2d_weight_gradient import Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.rungs.sm90_halves import WGMMA_SPLIT, WINDOW_SPLIT
from escalade.ops.shared.images import MEMORY_FORMAT
from escalade.tune.verification import compare
from tests.gpu.suitable import INPUT_GRADIENT, input_gradient_beyond_32_bits
from tests.support import check, label, with_batch

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("rung", INPUT_GRADIENT.ladder.rungs, ids=label)
def test_every_rung_of_the_input_gradient_beyond_32_bits(
    rung: Rung[Conv2dInputGradientProblem], much_memory: Callable[[int], None], cuda: torch.device, seed: int
) -> None:
    """A stride of 2, for rungs that support one: results are interleaved, in an image past 2^31 elements."""
    problem = input_gradient_beyond_32_bits(rung)
    assert problem is not None and problem.elements > 2**31
    recipe = rung.recipe(problem, rung.configs(problem)[0])
    much_memory(problem.bytes + sum(workspace.bytes for workspace in recipe.workspaces))
    f, one = problem.forward, with_batch(problem, 1)
    weight = INPUT_GRADIENT.inputs(one, cuda, seed)["weight"]
    gradient = torch.empty(
        (f.batch, f.filters, f.output_height, f.output_width),
        dtype=STORAGE[problem.dtype], device=cuda, memory_format=MEMORY_FORMAT[problem.layout],
    )  # fmt: skip
    for chunk in gradient.split(512):
        chunk.normal_()
    dx = conv2d_input_gradient(
        gradient, weight, (f.height, f.width), stride=f.stride, padding=f.padding, groups=f.groups,
        tf32=problem.dtype == "tf32", rung=rung.name,
    )  # fmt: skip
    for first in (0, f.batch // 2, f.batch - 1):
        inputs = {"gradient": gradient[first : first + 1], "weight": weight}
        expected = INPUT_GRADIENT.reference(one, inputs)
        allowed = rung.tolerance(one, relative_error(INPUT_GRADIENT.peer(one, inputs), expected))
        assert compare(dx[first : first + 1], expected, allowed)[0] == "", f"image {first}"


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("256to512_8_k4s2p1_b8_bias+relu", "fp16"),  # CTAs of clusters share sums
        ("64to128_129x127_k4s2p1_b8_bias[x*sigmoid(x)]", "bf16"),
        ("64to128_128_k2s2p0_b4_bias", "fp16"),
        ("64to128_56_k3s2_b32_mask", "fp16"),  # several rounds of phases with one to four taps
        ("60to64_100x99_k5x2s3x2p2x0_b3_res", "fp16"),
        ("64to128_57_k3s2_b8_mask", "tf32"),
    ],
)
def test_all_classes_of_pixels_in_one_launch(name: str, dtype: str, cuda: torch.device, seed: int) -> None:
    rung = INPUT_GRADIENT.ladder.rung("one_launch").on(Card.of(cuda))
    problem = Conv2dInputGradientProblem.parse(name, dtype, "nhwc")
    for config in rung.configs(problem):
        check(INPUT_GRADIENT, rung, problem, config, cuda, seed)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("1to56_766_k9s3_b1_bias", "fp16"),
        ("21to21_512_k16s8p4_b1_bias[x*sigmoid(x)]", "bf16"),
        ("512to100_4_k4s4p0_b8_bias+relu", "fp16"),  # a single phase, stored as is
        ("21to21_32_k4s2p1_b3", "tf32"),
        ("3to24_99_k5s3p1_b2_bias", "fp32"),
    ],
)
def test_all_classes_of_pixels_by_one_convolution(
    name: str, dtype: str, cuda: torch.device, seed: int
) -> None:
    rung = INPUT_GRADIENT.ladder.rung("subpixel").on(Card.of(cuda))
    problem = Conv2dInputGradientProblem.parse(name, dtype, "nhwc")
    for config in rung.configs(problem):
        check(INPUT_GRADIENT, rung, problem, config, cuda, seed)


@pytest.mark.parametrize("rung", [rung.name for rung in OPERATIONS["conv2d_weight_gradient"].ladder])
def test_every_rung_of_the_weight_gradient_beyond_32_bits(
    rung: str, much_memory: Callable[[int], None], cuda: torch.device
) -> None:
    """All images but the last are zeros: a wrapped offset would miss the last one's contribution."""
    channels, filters = {"few_channels": 8, "skinny": 4, "atomics": 1, "shared_sums": 1}.get(rung, 64), 64
    batch = 2**31 // (64 * 128 * 128) + 4
    fp32 = rung.endswith(("_split", "atomics", "_sums"))
    dtype = torch.float32 if fp32 else torch.float16
    much_memory((8 if fp32 else 2) * batch * (channels + filters) * 128 * 128)  # the fp16 halves are as large
    layout = torch.channels_last
    x = torch.empty(batch, channels, 128, 128, device=cuda, dtype=dtype, memory_format=layout).zero_()
    gradient = torch.empty(batch, filters, 128, 128, device=cuda, dtype=dtype, memory_format=layout)
    gradient.zero_()
    x[-1].normal_()
    gradient[-1].normal_().div_(128)
    assert max(x.numel(), gradient.numel()) > 2**31
    groups = {"depthwise": channels, "wgmma_groups": 4}.get(rung, 1)
    given: dict[str, Any] = {"padding": 1, "groups": groups, "bias": True, "rung": rung}
    found, of_bias = conv2d_weight_gradient(x, gradient, 3, **given)
    alone, of_bias_alone = conv2d_weight_gradient(x[-1:], gradient[-1:], 3, **given)
    assert of_bias is not None and of_bias_alone is not None
    torch.testing.assert_close(found, alone, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(of_bias, of_bias_alone, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("rung", [WGMMA_SPLIT, WINDOW_SPLIT], ids=label)
def test_long_sums_of_one_sign_keep_the_accuracy_of_fp32(
    rung: Rung[Any], cuda: torch.device, seed: int
) -> None:
    """Tensor cores truncate sums: for a thousand products of equal sign nothing compensates that, and
    2e-5 would be missing. On an H200 it is 5.4e-6."""
    problem = replace(Conv2dWeightGradientProblem.parse("256to256_16_k3s1_b512"), dtype="fp32", layout="nhwc")
    operation = OPERATIONS["conv2d_weight_gradient"]
    inputs = {name: tensor.abs() for name, tensor in operation.inputs(problem, cuda, seed).items()}
    found, _ = conv2d_weight_gradient(inputs["x"], inputs["gradient"], 3, padding=1, rung=rung.name)
    assert relative_error(found, operation.reference(problem, inputs)) < 8e-6


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("128to128_28_k3s1g32_b16", "fp16"),  # ResNeXt: 16 groups per tile
        ("1024to1024_7_k3s1g32_b8", "bf16"),
        ("208to208_15x13_k3s2g26_b9_bias", "fp16"),  # RegNet: a partial tile at the end
        (
            "120to72_19_k5x3s1x2p2x1d1x2g6_b7_bias",
            "fp16",
        ),  # groups of 20 channels and 12 filters, two to a tile
    ],
)
def test_weight_gradients_of_groups(name: str, dtype: str, cuda: torch.device, seed: int) -> None:
    operation = OPERATIONS["conv2d_weight_gradient"]
    rung = operation.ladder.rung("wgmma_groups").on(Card.of(cuda))
    problem = Conv2dWeightGradientProblem(Conv2dProblem.parse(name, dtype, "nhwc"))
    for config in rung.configs(problem):
        check(operation, rung, problem, config, cuda, seed)
