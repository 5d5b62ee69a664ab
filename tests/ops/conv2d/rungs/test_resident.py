"""The rung for 1x1 filters with resident weights: its orders of channels and filters on the twin, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade.device.nvrtc import compile_program
from escalade.device.recipe import KernelCall
from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Order
from escalade.ops.conv2d import Conv2dOperation, Conv2dProblem
from escalade.ops.conv2d.rungs.resident import RUNGS, ResidentConfig
from tests.support import TINY, Sample, check

CPU = torch.device("cpu")
CONV2D = Conv2dOperation()
RUNG = RUNGS[0].on(TINY)


def resident(name: str, dtype: str = "fp16") -> Conv2dProblem:
    return Conv2dProblem.parse(name, dtype, "nhwc")


GROUPS = resident("24to120_7_k1s1_b1_bias+res[silu(x)]")
"""Filters in groups of four, two and one blocks, the last of them half a block; channels that end in half a block."""
ROUNDS = resident("600to40_8_k1s1_b2_bias")
"""More channels than registers hold at once, and not a multiple of those."""
CASES = (
    (GROUPS, ResidentConfig(2, 8, 1, 2)),
    (ROUNDS, ResidentConfig(1, 3, 7, 2)),
    (resident("600to40_8_k1s1_b2[pre:gate*relu(gain*x+shift)]"), ResidentConfig(2, 3, 7, 1)),
    (resident("36to28_9_k1s1_b1_bias+res", "tf32"), ResidentConfig(2, 2, 3, 1)),
    (resident("40to72_9_k1s2p0_b2_xpitch48_ypitch80"), ResidentConfig(4, 3, 2, 1)),
)


@pytest.mark.share(7)
@pytest.mark.parametrize(("problem", "config"), CASES, ids=lambda value: getattr(value, "name", None))
def test_tiles_that_end_anywhere(problem: Conv2dProblem, config: ResidentConfig, seed: int) -> None:
    check(CONV2D, RUNG, problem, config, CPU, seed)


def test_no_race_and_nothing_read_that_nobody_wrote(seed: int) -> None:
    options = TwinOptions(order=Order(seed=seed), checks=True)
    check(CONV2D, RUNG, *CASES[0], CPU, seed, options)


def test_an_infinity_meets_no_zero_of_the_padding(seed: int) -> None:
    problem, config = CASES[1]
    inputs = CONV2D.inputs(problem, CPU, seed)
    inputs["weight"].abs_().add_(1)
    inputs["x"][0, 0, 2, 3] = torch.inf
    y = CONV2D.output(problem, CPU)
    bind(RUNG.recipe(problem, config), {**inputs, "y": y})()
    assert y[0, :, 2, 3].isposinf().all() and y.isfinite().sum() == y.numel() - problem.filters


def test_a_nan_stays_with_its_filter_where_two_share_a_reciprocal(seed: int) -> None:
    problem, config = CASES[0]
    inputs = CONV2D.inputs(problem, CPU, seed)
    inputs["weight"][3] = torch.nan
    y = CONV2D.output(problem, CPU)
    bind(RUNG.recipe(problem, config), {**inputs, "y": y})()
    assert y[:, 3].isnan().all() and y.isnan().sum() == y[:, 3].numel()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"filter_height": 3, "filter_width": 3}, "1x1 filters"),
        ({"padding": (1, 1)}, "without padding"),
        ({"layout": "nchw"}, "layout nhwc"),
        ({"dtype": "fp32"}, "not fp32"),
        ({"channels": 20}, "ragged takes any"),
        ({"filters": 20}, "ragged takes any"),
        ({"y_pitch": 128}, "pitched y"),
        ({"channels": 16384}, "overlapped_store takes any"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], reason: str) -> None:
    assert reason in (RUNG.supports(replace(GROUPS, **changes)) or "")


def test_the_best_configs_do_not_spill(sample: Sample) -> None:
    problems = (
        "24to144_56_k1s1_b32_bias[silu(x)]",
        "144to24_56_k1s1_b32_bias+res",
        "992to128_14_k1s1_b32_relu",
    )
    for name in sample(problems, 1):
        rung, problem = RUNGS[0], resident(name)
        config = rung.configs(problem)[0]
        call = rung.recipe(problem, config).steps[-1]
        assert isinstance(call, KernelCall) and isinstance(config, ResidentConfig)
        resources = compile_program(call.program, "sm_90a").resources
        assert resources.spill_bytes == 0, config
        assert resources.registers * call.block[0] * config.blocks_per_sm <= 65536, config
