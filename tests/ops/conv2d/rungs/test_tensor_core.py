"""The tensor-core rungs: split-K within the kernel, and a second image concatenated to the first."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade.device.recipe import KernelCall
from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Order
from escalade.ops import OPERATIONS
from escalade.ops.base.rung import Rung
from escalade.ops.choose.choice import choose
from escalade.ops.conv2d import Conv2dOperation, Conv2dProblem
from escalade.ops.conv2d.rungs.mma_config import MmaConfig
from tests.support import check

CPU = torch.device("cpu")
CONV2D = Conv2dOperation()
FUSED = Conv2dOperation.ladder.rung("fused_epilogue")
DEEP = Conv2dProblem.square(
    64, 40, 7, 3, batch=1, dtype="fp16", layout="nhwc", bias=True, residual=True, relu=True
)


def in_parts(rung: Rung[Any], problem: Conv2dProblem, splits: int) -> MmaConfig:
    config = rung.configs(problem)[0]
    assert isinstance(config, MmaConfig)
    return replace(config, splits=splits)


@pytest.mark.share(7)
@pytest.mark.parametrize("splits", [2, 3, 9, 16])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "tf32"])
def test_parts_are_added_up(splits: int, dtype: str, seed: int) -> None:
    """16 splits of 9 tiles: the last ones are empty."""
    problem = replace(DEEP, dtype=dtype)
    check(CONV2D, FUSED, problem, in_parts(FUSED, problem, splits), CPU, seed)


def test_parts_of_split_operands_are_added_up(seed: int) -> None:
    rung = Conv2dOperation.ladder.rung("tensor_core_split")
    problem = replace(DEEP, dtype="fp32")
    check(CONV2D, rung, problem, in_parts(rung, problem, 4), CPU, seed)


def test_parts_meet_without_a_race(seed: int) -> None:
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    check(CONV2D, FUSED, DEEP, in_parts(FUSED, DEEP, 3), CPU, seed, options)


def test_the_order_of_blocks_changes_no_bit_and_tickets_are_left_at_zero(seed: int) -> None:
    inputs = CONV2D.inputs(DEEP, CPU, seed)
    recipe = FUSED.recipe(DEEP, in_parts(FUSED, DEEP, 4))
    sizes = {workspace.name: workspace for workspace in recipe.workspaces}
    assert sizes["tickets"].zeroed and not sizes["parts"].zeroed
    tickets = sizes["tickets"].allocate(CPU)
    results = []
    for order in (Order(), Order(seed=seed), Order(seed=seed + 1)):
        y = CONV2D.output(DEEP, CPU)
        bind(recipe, {**inputs, "y": y, "tickets": tickets}, options=TwinOptions(order=order))()
        assert not tickets.any()
        results.append(y)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("size", [(64, 64, 56), (128, 128, 28), (256, 256, 14), (512, 512, 7)])
def test_one_image_is_spread_over_the_card_in_one_launch(size: tuple[int, int, int]) -> None:
    channels, filters, pixels = size
    problem = Conv2dProblem.square(channels, filters, pixels, 3, batch=1, dtype="fp16", layout="nhwc")
    config = FUSED.configs(problem)[0]
    recipe = FUSED.recipe(problem, config)
    assert len(recipe.steps) == 1
    (call,) = (step for step in recipe.steps if isinstance(step, KernelCall))
    assert 90 <= call.grid[0] * call.grid[1] <= 264
    assert call.overlap


# --- a second concatenated image


SHORTCUT = replace(DEEP, filters=24, residual=False, shortcut_channels=64, shortcut_stride=2)


@pytest.mark.share(7)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"channels": 24, "shortcut_channels": 40, "shortcut_size": (13, 14), "residual": True},
        {"channels": 12, "shortcut_channels": 12, "dtype": "tf32"},
        {"channels": 3, "batch": 3},
        {"filter_height": 17, "channels": 8, "padding": (8, 1), "height": 7},
    ],
)
def test_a_shortcut_joins_the_sums(change: dict[str, Any], splits: int, seed: int) -> None:
    """At the boundary of two tiles or inside a split, after padded channels, and without tap masks."""
    problem = replace(SHORTCUT, **change)
    assert FUSED.supports(problem) is None
    check(CONV2D, FUSED, problem, in_parts(FUSED, problem, splits), CPU, seed)


def test_a_shortcut_is_read_within_its_bounds(seed: int) -> None:
    problem = replace(SHORTCUT, shortcut_channels=40, shortcut_size=(13, 13), batch=2, channels=8)
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    for splits in (1, 2):
        check(CONV2D, FUSED, problem, in_parts(FUSED, problem, splits), CPU, seed, options)


def test_shortcuts_that_no_copy_divides_are_refused() -> None:
    assert "no multiple" in str(FUSED.supports(replace(SHORTCUT, shortcut_channels=20)))
    for rung in Conv2dOperation.ladder:
        if not rung.supports_shortcut:  # type: ignore[attr-defined]
            problem = replace(SHORTCUT, dtype="fp32", layout="nchw")
            assert "this one has 64 channels" in str(rung.supports(problem))


def test_a_shortcut_has_a_rung_to_choose() -> None:
    assert choose(OPERATIONS["conv2d"], replace(SHORTCUT, layout="nchw"), CPU).rung.name == "fused_epilogue"
    assert choose(OPERATIONS["conv2d"], replace(SHORTCUT, dtype="fp32"), CPU).rung.name == "wgmma_split"
