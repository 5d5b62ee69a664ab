"""The rung for channel counts that no copy size divides: odd sizes on the twin, refusals, and registers."""

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
from escalade.ops.conv2d.rungs.ragged import RUNGS
from tests.support import Sample, check

CPU = torch.device("cpu")
CONV2D = Conv2dOperation()
(RUNG,) = RUNGS


def ragged(name: str, dtype: str = "fp16") -> Conv2dProblem:
    return Conv2dProblem.parse(name, dtype, "nhwc")


PROBLEMS = (
    ragged("10to21_9x13_k1s1_b2_bias+res+relu"),
    ragged("3to16_13_k3s2_b2_bias+relu"),
    ragged("7to100_6_k3s1_b1", "bf16"),
    ragged("5to24_9_k3s1p2d2_b1_res"),
    ragged("6to9_11_k5x3s1x2_b2_bias", "tf32"),
    ragged("3to8_8_k4s4p0_b1", "tf32"),
    ragged("32to3_8_k3s1_b1_bias"),
    ragged("10to21_6_k3s2_b2_bias_xpitch24_ypitch40"),
    ragged("29to6_5_k1s1_b2_xpitch32_ypitch16"),
    ragged("16to1_7_k3s2_b2", "tf32"),
    ragged("5to12_7_k3s1_b2_bias+res", "fp32"),
    ragged("18to33_5_k3s1_b1", "fp32"),
)


@pytest.mark.share(7)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: f"{problem.name}_{problem.dtype}")
def test_small_odd_sizes(problem: Conv2dProblem, seed: int) -> None:
    check(CONV2D, RUNG, problem, RUNG.configs(problem)[0], CPU, seed)


def test_no_race_and_nothing_read_that_nobody_wrote(seed: int) -> None:
    options = TwinOptions(order=Order(seed=seed), checks=True)
    problem = PROBLEMS[0]
    check(CONV2D, RUNG, problem, RUNG.configs(problem)[-1], CPU, seed, options)


def test_what_lies_behind_a_pixels_channels_does_not_reach_its_sum(seed: int) -> None:
    """The last step of a run is padded with zeros on both sides: a NaN of the next pixel must not be multiplied by
    zero."""
    problem = replace(PROBLEMS[0], residual=False, relu=False)
    inputs = CONV2D.inputs(problem, CPU, seed)
    inputs["x"][0, :, 2, 3] = torch.nan
    y = CONV2D.output(problem, CPU)
    bind(RUNG.recipe(problem, RUNG.configs(problem)[0]), {**inputs, "y": y})()
    assert y[0, :, 2, 3].isnan().all() and y.isnan().sum() == problem.filters


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"channels": 16, "filters": 64}, "no multiple of 16 bytes"),
        ({"layout": "nchw"}, "layout nhwc"),
        ({"dtype": "fp8"}, "not fp8; persistent does"),
        ({"channels": 3001}, "fused_epilogue takes any"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], reason: str) -> None:
    assert reason in (RUNG.supports(replace(PROBLEMS[0], **changes)) or "")


@pytest.mark.parametrize(
    "problem",
    [ragged("50to75_56_k1s1_b32_bias+res+relu"), ragged("29to29_56_k3s1_b32_bias+res+relu", "fp32")],
    ids=lambda problem: problem.name,
)
def test_the_best_configs_do_not_spill(problem: Conv2dProblem, sample: Sample) -> None:
    for config in sample(RUNG.configs(problem)[:2], 1):
        call = RUNG.recipe(problem, config).steps[-1]
        assert isinstance(call, KernelCall)
        resources = compile_program(call.program, "sm_90a").resources
        assert resources.spill_bytes == 0, config
        assert resources.registers * call.block[0] * config.as_dict()["blocks_per_sm"] <= 65536, config
