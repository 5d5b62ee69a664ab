"""Transposed convolutions in NCHW on the twin: phases, borders, masks and residuals, consecutive tiles."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from escalade.device.recipe import KernelCall
from escalade.device.run import TwinOptions
from escalade.device.twin import Order
from escalade.ops.conv2d_input_gradient.operation import CONV2D_INPUT_GRADIENT
from escalade.ops.conv2d_input_gradient.problem import Conv2dInputGradientProblem
from escalade.ops.conv2d_input_gradient.rungs.planes import PLANES
from tests.support import check

CPU = torch.device("cpu")


def planes(name: str) -> Conv2dInputGradientProblem:
    return Conv2dInputGradientProblem.parse(name, "tf32", "nchw")


@pytest.mark.share(7)
@pytest.mark.parametrize(
    "name",
    [
        "9to16_16_k4s2p1_b2_bias",
        "8to40_17_k4s2p1_b1_bias",  # output padding
        "5to8_24x16_k2s2p0_b1_bias[tanh(x)]",
        "16to40_9x15_k3s2_b2_mask",  # a tap in only one phase
        "3to20_25x39_k3s2_b1_res",
        "4to7_23x24_k6x3s3x1p2x1_b1",
        "10to4_31x35_k5x7s2x4p0_b1",  # all configs offered share tiles
    ],
)
def test_small_odd_sizes(name: str, seed: int) -> None:
    problem = planes(name)
    assert PLANES.supports(problem) is None
    configs = PLANES.configs(problem)
    late = TwinOptions(Order(seed, late=True), checks=True)
    shared = next(one for one in configs if not one.ping_pong)
    check(CONV2D_INPUT_GRADIENT, PLANES, problem, shared, CPU, seed, late)
    own = next((one for one in configs if one.ping_pong), None)
    assert (own is None) == name.startswith("10to4")
    if own:
        check(CONV2D_INPUT_GRADIENT, PLANES, problem, own, CPU, seed)


def test_every_filter_is_in_one_tile() -> None:
    problem = planes("32to32_513_k4s2p1_b32_bias")
    for config in PLANES.configs(problem):
        *_, call = PLANES.recipe(problem, config).steps
        assert isinstance(call, KernelCall)
        assert call.grid[0] % -(-4 * 32 // config.width) == 0


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("8to8_16_k3s1d2_b1", "no dilation"),
        ("8to8_16_k3s1g2_b1", "groups=1"),
        ("8to8_20_k9s5_b1", "strides up to 4"),
        ("8to8_21_k3s1_b1", "no multiple"),
        ("4to7_24_k6s3p1_b1", "beyond the last"),
    ],
)
def test_what_it_refuses(name: str, reason: str) -> None:
    assert reason in (PLANES.supports(planes(name)) or "")
    other = planes("8to16_16_k4s2p1_b2_bias")
    assert "takes layout nchw" in (PLANES.supports(replace(other, layout="nhwc")) or "")
