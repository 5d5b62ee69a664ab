"""conv2d_weight_gradient of few channels or filters: the roles of both tensors, several bands, every tap, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from escalade.ops import OPERATIONS
from escalade.ops.conv2d_weight_gradient import Conv2dWeightGradientProblem
from escalade.ops.conv2d_weight_gradient.rungs.skinny import SKINNY, Roles, SkinnyConfig
from tests.support import check

CPU = torch.device("cpu")
OPERATION = OPERATIONS["conv2d_weight_gradient"]


def posed(name: str, dtype: str = "fp16") -> Conv2dWeightGradientProblem:
    return replace(Conv2dWeightGradientProblem.parse(name), dtype=dtype, layout="nhwc")


@pytest.mark.parametrize(
    ("name", "swapped", "pad", "bias_tap"),
    [
        ("3to256_32_k3s1_b1", False, 1, 4),
        ("256to3_32_k3s1_b1", True, 1, 4),
        (
            "64to3_32_k3s1p0_b1",
            True,
            2,
            0,
        ),  # fewer gradients than pixels, and the first tap covers all of them
        (
            "64to3_32_k3s1p2_b1",
            True,
            0,
            None,
        ),  # windows of zeros only: no tap covers the gradients of all
        ("64to3_32_k3s1p2d2_b1", True, 2, 4),
    ],
)
def test_the_tensor_with_few_channels_is_the_narrow_one(
    name: str, swapped: bool, pad: int, bias_tap: int | None
) -> None:
    roles = Roles.of(posed(name).forward)
    assert (roles.swapped, roles.rows.pad, roles.bias_tap) == (swapped, pad, bias_tap)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("3to136_11x9_k3s2_b3_bias", "bf16"),  # a stride, an odd height, channels that do not fill a warp's
        ("136to2_7x10_k3x2s1p0d2_b2_bias", "fp16"),
        ("136to4_6x17_k3s1p2_b2", "fp32"),
        ("4to72_5x9_k3s1_b2_bias", "tf32"),  # the ones have a separate tile
    ],
)
def test_several_bands_and_warps(name: str, dtype: str, seed: int) -> None:
    problem = posed(name, dtype)
    config = next(c for c in SKINNY.configs(problem) if isinstance(c, SkinnyConfig) and c.band == 2)
    check(OPERATION, SKINNY, problem, replace(config, part_bands=2), CPU, seed)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("64to64_8_k3s1_b1", "up to 48"),
        ("64to3_8_k3s2_b1", "stride 1"),
        ("3to12_8_k3s1_b1", "multiples of 8 channels"),
        ("64to3_8_k3s1p2_b1_bias", "leaves none"),
        ("8to8_8_k1s1g8_b1", "groups=1"),
        ("3to8_2x9000_k3s1_b1", "do not fit"),
    ],
)
def test_what_it_refuses(name: str, reason: str) -> None:
    sentence = SKINNY.supports(posed(name))
    assert sentence is not None and reason in sentence
