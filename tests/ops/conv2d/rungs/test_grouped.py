"""The grouped rung: odd sizes on the twin, several groups per tile, refusals, and registers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade.device.nvrtc import compile_program
from escalade.device.recipe import KernelCall
from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Order
from escalade.ops.base.card import HOPPER_SHARED, MIN_SHARED
from escalade.ops.base.cards import typical_card
from escalade.ops.conv2d import Conv2dOperation, Conv2dProblem
from escalade.ops.conv2d.rungs.grouped import RUNGS, GroupedConfig
from tests.support import Sample, check

CPU = torch.device("cpu")
CONV2D = Conv2dOperation()
(RUNG,) = RUNGS


def grouped(
    channels: int, filters: int, size: int, filter_size: int, groups: int, **rest: Any
) -> Conv2dProblem:
    rest = {"dtype": "fp16", "layout": "nhwc", **rest}
    return Conv2dProblem.square(channels, filters, size, filter_size, groups=groups, **rest)


PROBLEMS = {
    "groups_of_4": grouped(32, 32, 9, 3, 8, batch=2, bias=True, residual=True, relu=True),
    "groups_of_8": grouped(24, 24, 7, 3, 3, batch=3, bias=True),
    "groups_of_16": grouped(32, 32, 6, 3, 2, residual=True, relu=True),
    "groups_of_24": grouped(48, 48, 5, 3, 2, batch=2),
    "groups_of_64": grouped(128, 128, 5, 3, 2, bias=True),
    "groups_of_12": grouped(24, 24, 8, 3, 2, relu=True),
    "groups_of_one": grouped(16, 32, 7, 3, 16, bias=True),
    "more_filters_than_channels": grouped(16, 48, 7, 3, 2, residual=True),
    "fewer_filters_than_channels": grouped(64, 16, 6, 3, 4, batch=2),
    "stride_2": grouped(32, 32, 11, 3, 4, batch=2, stride=2, bias=True, relu=True),
    "pointwise": grouped(16, 16, 6, 1, 2, batch=3),
    "five": grouped(16, 16, 8, 5, 4, stride=2, bias=True),
    "dilated": Conv2dProblem(
        1, 16, 11, 9, 16, 3, 3, (1, 1), (2, 2), (2, 2), 2, dtype="fp16", layout="nhwc", relu=True
    ),
    "not_square": Conv2dProblem(
        2, 16, 9, 14, 16, 1, 5, (2, 3), (0, 2), (1, 2), 4, dtype="fp16", layout="nhwc", bias=True
    ),
    "wide_padding": grouped(16, 16, 3, 3, 2, padding=4),
    "bf16": grouped(32, 32, 8, 3, 8, bias=True, residual=True, relu=True, dtype="bf16"),
    "tf32": grouped(32, 32, 8, 3, 8, batch=2, bias=True, residual=True, relu=True, dtype="tf32"),
    "tf32_groups_of_12": grouped(24, 48, 7, 3, 2, stride=2, dtype="tf32"),
    "fp32": grouped(12, 24, 8, 3, 3, batch=2, bias=True, residual=True, relu=True, dtype="fp32"),
    "fp32_groups_of_6": grouped(24, 24, 7, 5, 4, stride=2, dtype="fp32"),
}


@pytest.mark.share(7)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_small_odd_sizes(problem: Conv2dProblem, seed: int) -> None:
    check(CONV2D, RUNG, problem, RUNG.configs(problem)[0], CPU, seed)


@pytest.mark.parametrize(
    "config",
    [
        GroupedConfig(1, 4, 7, 9, bundles=4, warps_m=1, tiles_m=2),  # tiles that the image does not fill
        GroupedConfig(2, 9, 10, 18, bundles=1, warps_m=2, tiles_m=6),  # the last tile has one of the images
        GroupedConfig(1, 1, 3, 5, bundles=2, warps_m=1, tiles_m=1),
    ],
    ids=str,
)
def test_tiles_of_any_size(config: GroupedConfig, seed: int) -> None:
    problem = Conv2dProblem(
        3,
        32,
        9,
        10,
        32,
        3,
        3,
        padding=(1, 1),
        groups=8,
        dtype="fp16",
        layout="nhwc",
        bias=True,
        residual=True,
    )
    check(CONV2D, RUNG, problem, config, CPU, seed)


def test_the_last_block_may_have_fewer_groups(seed: int) -> None:
    problem = grouped(40, 80, 6, 3, 5, batch=2, stride=2, bias=True, residual=True)
    config = GroupedConfig(1, 3, 2, 6, bundles=3, warps_m=1, tiles_m=1)
    offered = {one.bundles for one in RUNG.configs(problem) if isinstance(one, GroupedConfig)}
    assert offered > {1, 5}, "two blocks, of three groups and of two"
    check(CONV2D, RUNG, problem, config, CPU, seed, TwinOptions(checks=True))


def test_blocks_that_walk_over_many_tiles_use_two_stages_without_a_race(seed: int) -> None:
    """Copies as late as allowed; enough channels for one CTA each."""
    problem = grouped(1088, 1088, 2, 3, 136, batch=3, bias=True)
    config = GroupedConfig(1, 1, 2, 4, bundles=1, warps_m=1, tiles_m=1)
    (call,) = RUNG.recipe(problem, config).steps
    assert isinstance(call, KernelCall) and call.grid == (136, 1, 1), "a block walks over six tiles"
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    check(CONV2D, RUNG, problem, config, CPU, seed, options)


def test_nan_and_infinity_stay_in_their_group(seed: int) -> None:
    """Two groups are one product, with zeros between them."""
    problem = grouped(16, 16, 6, 3, 4, relu=True)
    inputs = CONV2D.inputs(problem, CPU, seed)
    inputs["weight"] = inputs["weight"].abs() + 0.1
    inputs["x"][0, 1, 2, 2], inputs["x"][0, 12, 5, 5] = torch.nan, torch.inf
    y = CONV2D.output(problem, CPU)
    bind(RUNG.recipe(problem, RUNG.configs(problem)[0]), {**inputs, "y": y})()
    assert y[0, :4, 1:4, 1:4].isnan().all() and y.isnan().sum() == 4 * 9
    assert y[0, 12:, 4:, 4:].isinf().all() and y.isinf().sum() == 4 * 4
    clean = CONV2D.output(problem, CPU)
    inputs["x"] = inputs["x"].nan_to_num(0.0, 0.0)
    bind(RUNG.recipe(problem, RUNG.configs(problem)[0]), {**inputs, "y": clean})()
    finite = y.isfinite()
    torch.testing.assert_close(y[finite], clean[finite])


def test_the_residual_may_be_overwritten(seed: int) -> None:
    problem = grouped(16, 16, 7, 3, 4, batch=2, bias=True, residual=True, relu=True)
    recipe = RUNG.recipe(problem, RUNG.configs(problem)[0])
    inputs = CONV2D.inputs(problem, CPU, seed)
    y = CONV2D.output(problem, CPU)
    bind(recipe, {**inputs, "y": y})()
    bind(recipe, {**inputs, "y": inputs["residual"]})()
    assert torch.equal(inputs["residual"], y)


def test_a_card_with_little_shared_memory_is_told_of_it() -> None:
    problem = grouped(512, 512, 28, 3, 8, stride=2)
    assert RUNG.on(typical_card("sm_90a")).refusal(problem) is None
    assert "shared memory" in (RUNG.on(typical_card("sm_86")).refusal(problem) or "")
    assert RUNG.on(typical_card("sm_86")).refusal(RESNEXT) is None


RESNEXT = grouped(128, 128, 56, 3, 32, batch=256)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"groups": 1}, "more than one group"),
        ({"dtype": "fp8"}, "not fp8; persistent does"),
        ({"layout": "nchw"}, "layout nhwc"),
        ({"channels": 12, "filters": 12, "groups": 3}, "no multiple"),
        ({"channels": 256, "filters": 256, "groups": 2}, "up to 64"),
        ({"filter_height": 41, "filter_width": 41}, "direct takes any"),
        ({"shortcut_channels": 64}, "shortcut"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], reason: str) -> None:
    assert RUNG.supports(RESNEXT) is None
    assert reason in (RUNG.supports(replace(RESNEXT, **changes)) or "")


@pytest.mark.share(7)
@pytest.mark.parametrize(
    "problem",
    [
        RESNEXT,
        grouped(256, 256, 56, 3, 32, batch=32, stride=2, dtype="bf16"),
        grouped(512, 512, 14, 3, 32, batch=256),
        grouped(168, 168, 28, 3, 7, batch=64),
        grouped(1024, 1024, 14, 3, 32, batch=64),
        grouped(448, 448, 14, 3, 8, batch=64),
        grouped(128, 128, 56, 3, 32, batch=32, dtype="tf32"),
        grouped(512, 512, 14, 3, 32, batch=32, dtype="fp32"),
    ],
    ids=lambda problem: problem.name,
)
def test_the_best_configs_fit_and_do_not_spill(problem: Conv2dProblem, sample: Sample) -> None:
    problem = replace(problem, bias=True, residual=True, relu=True)
    for config in sample(RUNG.configs(problem)[:2], 1):
        (call,) = RUNG.recipe(problem, config).steps
        assert isinstance(call, KernelCall)
        assert (call.shared_bytes + 1024) * config.as_dict()["blocks_per_sm"] <= HOPPER_SHARED + 1024
        resources = compile_program(call.program, "sm_90a").resources
        assert resources.spill_bytes == 0, config
        assert resources.registers * call.block[0] * config.as_dict()["blocks_per_sm"] <= 65536, config
    (call,) = RUNG.recipe(problem, RUNG.configs(problem)[0]).steps
    assert isinstance(call, KernelCall) and call.shared_bytes <= MIN_SHARED, "the first fits every card"
