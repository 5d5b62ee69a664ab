"""Persistent rungs: odd sizes on the twin, every way to share work, refusals, and registers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade.device.nvrtc import compile_program
from escalade.device.recipe import KernelCall
from escalade.device.run import Executable, TwinOptions
from escalade.device.twin import Order
from escalade.ops.base.card import HOPPER_SHARED
from escalade.ops.base.rung import Rung
from escalade.ops.conv2d import Conv2dOperation, Conv2dProblem
from escalade.ops.conv2d.rungs.sm90_persistent import RUNGS, PersistentConfig
from tests.support import Sample, check

CPU = torch.device("cpu")
CONV2D = Conv2dOperation()
each_rung = pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
LARGE = Conv2dProblem.square(128, 128, 28, 3, batch=256, dtype="fp16", layout="nhwc")


def half(*sizes: Any, **rest: Any) -> Conv2dProblem:
    return Conv2dProblem(*sizes, **{"dtype": "fp16", "layout": "nhwc", **rest})


FUSED = {"bias": True, "residual": True, "relu": True}
PROBLEMS = {
    "more_slabs_than_stages": half(1, 128, 5, 7, 64, 3, 3, padding=(1, 1), **FUSED),
    "fewer_slabs_than_stages": half(3, 128, 7, 5, 128, 1, 1, bias=True),
    "stride_2": half(2, 64, 11, 8, 64, 3, 3, (2, 2), (1, 1), residual=True),
    "dilation": half(1, 64, 9, 8, 72, 3, 3, (1, 1), (2, 2), (2, 2), bias=True),
    "channels_end_in_a_slab": half(2, 72, 6, 5, 136, 1, 3, padding=(0, 1), bias=True, relu=True),
    "few_channels": half(1, 8, 9, 7, 64, 3, 3, (3, 1), (1, 0)),
    "wide_padding": half(1, 64, 3, 2, 64, 2, 3, padding=(3, 2), bias=True),
    "shortcut": half(
        2, 64, 5, 6, 64, 3, 3, padding=(1, 1), bias=True, relu=True, shortcut_channels=128, shortcut_stride=2
    ),
    "odd_channels": half(1, 7, 6, 5, 70, 3, 3, padding=(1, 1), bias=True, residual=True),
    "tf32": half(2, 40, 6, 5, 68, 3, 3, padding=(1, 1), **FUSED, dtype="tf32"),
    "tf32_shortcut": half(1, 32, 5, 6, 64, 3, 3, padding=(1, 1), dtype="tf32", shortcut_channels=64),
    "fp8": half(2, 144, 6, 5, 128, 3, 3, padding=(1, 1), **FUSED, dtype="fp8", output="fp16"),
    "fp8_through": half(2, 256, 7, 5, 128, 1, 1, **FUSED, dtype="fp8"),
    "pool": half(3, 64, 8, 8, 72, 3, 3, padding=(1, 1), bias=True, relu=True, pool=(2, 2), places=True),
    "tf32_pool": half(1, 32, 8, 4, 64, 1, 1, residual=True, dtype="tf32", pool=(4, 2), places=True),
    "bf16": half(2, 64, 6, 5, 128, 3, 3, padding=(1, 1), **FUSED, dtype="bf16"),
}


@pytest.mark.share(7)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_small_odd_sizes(problem: Conv2dProblem, seed: int, sample: Sample) -> None:
    """With one of the rungs, which all launch the same kernel; others every day."""
    for rung in sample([rung for rung in RUNGS if rung.supports(problem) is None], 1):
        check(CONV2D, rung, problem, rung.configs(problem)[0], CPU, seed)


@each_rung
def test_every_config_is_right_where_the_last_tile_is_not_full(
    rung: Rung[Conv2dProblem], seed: int, sample: Sample
) -> None:
    problem = half(5, 64, 9, 11, 192, 2, 2, bias=True, residual=True, relu=True)
    configs = {replace(config, splits=1): config for config in rung.configs(problem)}.values()
    assert len(configs) >= 4
    for config in sample(configs, 2):
        check(CONV2D, rung, problem, config, CPU, seed)


@pytest.mark.parametrize("filters", [60, 61])
def test_filters_that_are_no_multiple_of_eight(filters: int, seed: int) -> None:
    rung = next(rung for rung in RUNGS if rung.name == "persistent")
    problem = half(1, 64, 5, 6, filters, 1, 1, bias=True, residual=True, relu=True)
    check(CONV2D, rung, problem, rung.configs(problem)[0], CPU, seed)


def few_blocks(
    rung: Rung[Conv2dProblem], problem: Conv2dProblem, config: PersistentConfig, blocks: int
) -> KernelCall:
    """The launch for a GPU with that many SMs: each CTA then has several tiles."""
    (call,) = rung.recipe(problem, config).steps
    assert isinstance(call, KernelCall)
    return replace(call, grid=(blocks * config.cluster, 1, 1))


@pytest.mark.share(7)
@each_rung
@pytest.mark.parametrize("weights_ready", [False, True])
def test_tiles_follow_each_other_without_a_race(
    rung: Rung[Conv2dProblem], weights_ready: bool, seed: int
) -> None:
    """Copies and products as late as allowed, five tiles per CTA, in every way to share work."""
    problem = half(1, 64, 25, 25, 64, 3, 1, padding=(1, 0), bias=True, residual=True)
    inputs = CONV2D.inputs(problem, CPU, seed)
    expected = CONV2D.reference(problem, inputs)
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    ways: dict[tuple[object, ...], PersistentConfig] = {}
    for config in rung.configs(problem):
        assert isinstance(config, PersistentConfig)
        ways.setdefault((config.share, config.swapped, config.parts > 1), config)
    assert ways
    for config in ways.values():
        y = CONV2D.output(problem, CPU)
        recipe = rung.recipe(problem, config)
        if config.parts == 1:
            recipe = replace(recipe, steps=(few_blocks(rung, problem, config, 1),))
        Executable(recipe, CPU, options=options, weights_ready=weights_ready).bind({**inputs, "y": y})()
        assert (y.double() - expected).norm() / expected.norm() < 1e-3, config


@pytest.mark.share(7)
@pytest.mark.parametrize(
    ("config", "apart"),
    [
        (PersistentConfig(64, 64, "depth", 10), True),
        (PersistentConfig(64, 32, "depth", 12, splits=3), True),
        (PersistentConfig(64, 64, "depth", 10, splits=4), True),
        (PersistentConfig(128, 64, "depth", 8), False),
        (PersistentConfig(128, 64, "depth", 8, splits=2), False),
        (PersistentConfig(64, 128, "filters", 8, splits=8), True),
        (PersistentConfig(128, 64, "pixels", 8, splits=6), False),
    ],
    ids=str,
)
def test_parts_are_pushed_without_a_race(config: PersistentConfig, apart: bool, seed: int) -> None:
    """Into separate shared memory or over the stages; owners of nothing, of one part and of several."""
    assert config.parts_apart == apart and config.shared_bytes(2) <= HOPPER_SHARED
    rung = next(rung for rung in RUNGS if rung.name == "cluster_split_k")
    problem = half(1, 64, 9, 9, 61, 3, 3, padding=(1, 1), bias=True, residual=True, relu=True)
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    check(CONV2D, rung, problem, config, CPU, seed, options)


@each_rung
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "fp32"}, "fp16"),
        ({"layout": "nchw"}, "layout nhwc"),
        ({"groups": 2}, "groups=1"),
        ({"stride": (9, 9)}, "strides up to 8"),
        ({"padding": (129, 1)}, "corners"),
        ({"filter_width": 131, "width": 200}, "corners"),
    ],
)
def test_what_is_refused(rung: Rung[Conv2dProblem], changes: dict[str, Any], reason: str) -> None:
    small = replace(LARGE, batch=1)
    assert rung.supports(small) is None
    assert reason in (rung.supports(replace(small, **changes)) or "")


@pytest.mark.share(7)
@each_rung
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_configs_fit_and_do_not_spill(rung: Rung[Conv2dProblem], dtype: str, sample: Sample) -> None:
    problem = replace(LARGE, batch=1, dtype=dtype, bias=True, residual=True, relu=True)
    programs = {}
    for config in rung.configs(problem):
        (call,) = rung.recipe(problem, config).steps
        assert isinstance(call, KernelCall) and call.shared_bytes <= HOPPER_SHARED
        programs[call.program] = config
    for program, config in sample(programs.items(), 1):
        assert compile_program(program, "sm_90a").resources.spill_bytes == 0, config
