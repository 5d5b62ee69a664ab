"""Convolutions in NCHW on the twin: strides, padding, dilation, consecutive tiles, both ways to share the work."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from escalade.device.nvrtc import compile_program
from escalade.device.recipe import KernelCall, Recipe
from escalade.device.run import TwinOptions
from escalade.device.twin import Order
from escalade.errors import UnsupportedError
from escalade.ops.base.card import HOPPER_SHARED, TWIN
from escalade.ops.conv2d import Conv2dOperation, Conv2dProblem
from escalade.ops.conv2d.rungs.sm90_planes import RUNGS, Planes, PlanesConfig
from escalade.ops.conv2d_input_gradient import Conv2dInputGradientProblem
from tests.support import check

CPU = torch.device("cpu")
CONV2D = Conv2dOperation()
(RUNG,) = RUNGS


def planes(*sizes: Any, **rest: Any) -> Conv2dProblem:
    return Conv2dProblem(*sizes, **{"dtype": "tf32", "layout": "nchw", **rest})


@dataclass(frozen=True)
class OneBlock(Planes):
    """So that every warpgroup has several tiles."""

    def recipe(self, problem: Conv2dProblem, config: PlanesConfig) -> Recipe:
        recipe = super().recipe(problem, config)
        *before, call = recipe.steps
        assert isinstance(call, KernelCall)
        filters = -(-problem.filters // config.width)
        return replace(recipe, steps=(*before, replace(call, grid=(filters, 1, 1))))


PROBLEMS = {
    "resident weights": (
        planes(2, 8, 17, 20, 32, 3, 3, padding=(1, 1), bias=True, relu=True),
        PlanesConfig(32, 1, 2, 2, 3),
    ),
    "streamed weights": (
        planes(1, 72, 9, 36, 40, 3, 3, padding=(0, 2), bias=True, residual=True),
        PlanesConfig(64, 2, 4, 2, 2),
    ),
    "ping-pong": (
        planes(2, 40, 20, 20, 70, 3, 3, padding=(1, 1), bias=True, activation="x * sigmoid(x)"),
        PlanesConfig(64, 1, 2, 2, 2, ping_pong=True),
    ),
    "vectors": (
        planes(
            1,
            12,
            9,
            20,
            35,
            3,
            3,
            bias=True,
            residual=True,
            activation="clamp(mish(x) * a + b, -1, residual)",
        ),
        PlanesConfig(64, 1, 2, 2, 3),
    ),
    "maxima of pixels": (
        planes(2, 9, 17, 36, 33, 3, 3, bias=True, activation="tanh(x) * a", pool=(2, 2)),
        PlanesConfig(64, 2, 4, 2, 3),
    ),
    "means of pixels, by ping-pong": (
        planes(1, 20, 23, 28, 30, 3, 3, padding=(1, 1), relu=True, pool=(2, 2), mean=True),
        PlanesConfig(32, 4, 4, 2, 3, ping_pong=True),
    ),
    "ping-pong with resident weights": (
        planes(3, 16, 9, 24, 100, 1, 5, padding=(0, 2), activation="residual * tanh(x)", residual=True),
        PlanesConfig(112, 1, 2, 2, 10, ping_pong=True),
    ),
    "strides": (
        planes(2, 3, 23, 44, 17, 5, 3, stride=(2, 2), padding=(2, 1), bias=True),
        PlanesConfig(32, 4, 2, 2, 3),
    ),
    "dilation": (
        planes(1, 33, 14, 28, 33, 3, 3, padding=(2, 3), dilation=(2, 3)),
        PlanesConfig(64, 1, 2, 2, 3),
    ),
    "pixels by themselves": (planes(2, 50, 6, 64, 130, 1, 1, bias=True), PlanesConfig(128, 1, 8, 2, 2)),
}


@pytest.mark.parametrize(("problem", "config"), PROBLEMS.values(), ids=PROBLEMS)
def test_small_odd_sizes(problem: Conv2dProblem, config: PlanesConfig, seed: int) -> None:
    assert RUNG.supports(problem) is None
    check(CONV2D, RUNG, problem, config, CPU, seed)


@pytest.mark.share(7)
@pytest.mark.parametrize(("problem", "config"), PROBLEMS.values(), ids=PROBLEMS)
def test_tiles_that_follow_each_other(problem: Conv2dProblem, config: PlanesConfig, seed: int) -> None:
    """Copies and products finish as late as allowed, so that a stage freed too early is noticed."""
    rung = OneBlock("one_block", "", None, None)
    check(CONV2D, rung, problem, config, CPU, seed, TwinOptions(Order(seed, late=True), checks=True))


def test_every_config_fits_and_holds_its_tiles() -> None:
    for problem in (
        planes(16, 64, 128, 128, 128, 3, 3, bias=True),
        planes(1, 3, 224, 224, 64, 7, 7, stride=(2, 2), padding=(3, 3)),
        planes(4, 512, 16, 16, 512, 3, 3, padding=(1, 1)),
        planes(2, 8, 500, 500, 16, 1, 9, padding=(0, 4)),
    ):
        configs = RUNG.configs(problem)
        assert {config.ping_pong for config in configs} == {True, False}
        for config in configs:
            *_, call = RUNG.recipe(problem, config).steps
            assert isinstance(call, KernelCall) and call.shared_bytes <= HOPPER_SHARED


@pytest.mark.parametrize(
    ("config", "rest"),
    [
        (PlanesConfig(128, 2, 16, 3, 8), {"activation": "hardswish(x)", "pool": (2, 2)}),
        (PlanesConfig(128, 1, 8, 3, 10), {"activation": "x * tanh(log1p(exp(x)))"}),
    ],
)
def test_accumulators_stay_in_registers(config: PlanesConfig, rest: dict[str, Any]) -> None:
    """A loop that is not unrolled would index them in local memory."""
    *_, call = RUNG.recipe(planes(16, 64, 128, 128, 128, 3, 3, bias=True, **rest), config).steps
    assert isinstance(call, KernelCall)
    assert compile_program(call.program, "sm_90a").resources.stack_bytes < 128


def test_it_compiles_without_spills() -> None:
    problem = planes(16, 64, 128, 128, 128, 3, 3, bias=True, activation="x * sigmoid(x)")
    for config in (PlanesConfig(128, 2, 8, 2, 3), PlanesConfig(128, 2, 8, 2, 2, ping_pong=True)):
        *_, call = RUNG.recipe(problem, config).steps
        assert isinstance(call, KernelCall)
        assert compile_program(call.program, "sm_90a").resources.spill_bytes == 0


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": "nhwc"}, "takes layout nchw"),
        ({"dtype": "fp16"}, "takes tf32, not fp16"),
        ({"groups": 2}, "groups=1"),
        ({"stride": (3, 1)}, "strides up to 2"),
        ({"pool": (3, 3)}, "pools of 2x2"),
        ({"pool": (2, 2), "residual": True}, "pools of 2x2"),
        ({"width": 22}, "22 pixels are no multiple"),
    ],
)
def test_what_it_refuses(changes: dict[str, Any], reason: str) -> None:
    assert reason in (RUNG.supports(replace(planes(1, 8, 20, 20, 16, 3, 3), **changes)) or "")


def test_vectors_of_the_activation_are_for_planes_only() -> None:
    problem = planes(1, 8, 20, 20, 16, 3, 3, activation="relu(x) + b")
    assert RUNG.supports(problem) is None
    supporting = {rung.name for rung in CONV2D.ladder.on(TWIN) if rung.supports(problem) is None}
    assert supporting == {RUNG.name}
    with pytest.raises(UnsupportedError, match="vectors in its activation"):
        Conv2dInputGradientProblem(problem)
