"""The window rung: odd sizes, every way to tile an image, planted bugs, refusals, registers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade.device import program
from escalade.device.nvrtc import compile_program
from escalade.device.recipe import KernelCall, Recipe
from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Order, TwinError
from escalade.ops.base.card import HOPPER_SHARED
from escalade.ops.base.cards import typical_card
from escalade.ops.conv2d import Conv2dOperation, Conv2dProblem
from escalade.ops.conv2d.rungs.sm90_window import RUNGS, Window, WindowConfig, stages_of
from escalade.ops.conv2d.rungs.wgmma_conv import WgmmaConv
from escalade.ops.conv2d.rungs.window_tiling import WIDTHS, Tiling
from tests.device.twin.support import planted
from tests.support import Sample, check

CPU = torch.device("cpu")
CONV2D = Conv2dOperation()
(WINDOW,) = RUNGS
SOURCE = "conv2d/sm90_window.cu"


def half(*sizes: Any, **rest: Any) -> Conv2dProblem:
    return Conv2dProblem(*sizes, **{"dtype": "fp16", "layout": "nhwc", **rest})


LARGE = Conv2dProblem.square(64, 64, 56, 3, batch=256, dtype="fp16", layout="nhwc")
EPILOGUE: dict[str, Any] = {"bias": True, "residual": True, "relu": True}


def config(problem: Conv2dProblem, rows: int, columns: int) -> WindowConfig:
    return WindowConfig(rows, columns, stages_of(Tiling(WgmmaConv.of(problem), rows, columns)))


class OneBlock(Window):
    """One CTA per 64 filters, so that it has many tiles and wraps its ring many times."""

    def recipe(self, problem: Conv2dProblem, config: WindowConfig) -> Recipe:
        (call,) = super().recipe(problem, config).steps
        assert isinstance(call, KernelCall)
        return Recipe((replace(call, grid=(problem.filters // 64, 1, 1)),))


ONE_BLOCK = OneBlock("window", "", None, None)

PROBLEMS = {
    "whole_epilogue": half(2, 64, 5, 6, 64, 3, 3, padding=(1, 1), **EPILOGUE),
    "no_epilogue": half(1, 64, 7, 9, 64, 3, 3, padding=(1, 1)),
    "two_groups_of_filters": half(1, 64, 6, 5, 128, 3, 3, padding=(1, 1), bias=True, residual=True),
    "pointwise": half(2, 64, 4, 7, 64, 1, 1, bias=True, relu=True),
    "row_filter": half(1, 64, 6, 9, 64, 1, 5, padding=(0, 2), residual=True),
    "column_filter": half(1, 64, 9, 6, 64, 5, 1, padding=(1, 0), bias=True),
    "wide_padding": half(1, 64, 3, 2, 64, 2, 3, padding=(3, 2), **EPILOGUE),
    "dilation": half(1, 64, 9, 11, 64, 3, 2, padding=(2, 1), dilation=(2, 3), **EPILOGUE),
    "many_taps": half(1, 64, 6, 7, 64, 5, 5, padding=(2, 2), relu=True),
    "bf16": half(2, 64, 6, 5, 128, 3, 3, padding=(1, 1), dtype="bf16", **EPILOGUE),
}


@pytest.mark.share(7)
@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_small_odd_sizes(problem: Conv2dProblem, seed: int) -> None:
    check(CONV2D, WINDOW, problem, WINDOW.configs(problem)[0], CPU, seed)


@pytest.mark.share(7)
@pytest.mark.parametrize("filter_width", [1, 3])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("columns", [3, 4, 11], ids=lambda columns: f"columns_{columns}")
def test_images_are_cut_anywhere(rows: int, columns: int, filter_width: int, seed: int) -> None:
    """Tiles as wide as the image, those that divide it, and those that do not, with many wraps of one CTA's ring."""
    problem = half(2, 64, 7, 11, 64, 2, filter_width, padding=(1, filter_width // 2), **EPILOGUE)
    check(CONV2D, ONE_BLOCK, problem, config(problem, rows, columns), CPU, seed)


@pytest.mark.share(7)
@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("residual", [False, True])
def test_stages_and_panels_are_reused_without_a_race(stages: int, residual: bool, seed: int) -> None:
    """Copies, products and stores as late as allowed."""
    problem = half(3, 64, 4, 7, 64, 2, 2, bias=True, residual=residual)
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    for rows, columns in ((1, 4), (2, 6)):
        check(CONV2D, ONE_BLOCK, problem, WindowConfig(rows, columns, stages), CPU, seed, options)


BUGS = {
    "no wait for a full stage": (
        "        ring.wait_full();\n",
        "is in flight|nothing wrote|disagree",
    ),
    "no wait for an empty stage": ("        ring.wait_empty();\n", "more arrivals"),
    "no wait for the weights": (
        "        barrier_wait(memory.weights_full + r * 8, 0);",
        "is in flight|nothing wrote",
    ),
    "no wait for the products": (
        "        wgmma_wait<0>();\n",
        "still has to read|not waited for",
    ),
    "no turns": (
        "        ping_pong.wait();\n",
        "is in flight|nothing wrote|more arrivals|still has to read",
    ),
    "gaps are not cleared": (
        "    clear_gaps<STAGES>(memory.windows.stages, memory.staging_tiles);\n",
        "nothing wrote",
    ),
    "no fence before the products": ("        wgmma_fence();\n", "no wgmma.fence before it"),
    "no commit": ("    wgmma_commit();\n", "not waited for|still has to read"),
    "no wait for the launch in front": (
        "    wait_for_previous_launch();\n",
        "before wait_for_previous_launch",
    ),
    "no barrier after the barriers": (
        "    __syncthreads();\n",
        "nothing orders|no mbarrier|race|is in flight",
    ),
    "no wait for the last store": ("    staging.close();\n", "may still read"),
    "no wait for the residual": (
        "            barrier_wait(residual_full, parity);\n",
        "is in flight|race",
    ),
    "no wait for the store": (
        "        tma_store_wait_read<0>();  // the staging tile is free again\n",
        "still has to read",
    ),
    "no proxy fence before the store": (
        "        fence_async_proxy();\n        ",
        "without a proxy fence",
    ),
    "no barrier before the store": (
        "        warpgroup_sync(consumer);\n        ",
        "race|without a proxy fence|nothing wrote",
    ),
}


def whole_source() -> str:
    """With the header that contains half of it."""
    header = "conv2d/window_tile.cuh"
    text = program.read(header).replace("#pragma once\n", "")
    return planted(program.read(SOURCE), (f'#include "{header}"', text))


@pytest.mark.share(7)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_reported(bug: str, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    line, expected = BUGS[bug]
    text, read = planted(whole_source(), (line, "")), program.read
    monkeypatch.setattr(program, "read", lambda path: text if path == SOURCE else read(path))
    problem = half(5, 64, 3, 6, 64, 2, 2, bias=True, residual=True)
    recipe = ONE_BLOCK.recipe(problem, WindowConfig(1, 4, 3))
    tensors = {**CONV2D.inputs(problem, CPU, seed), "y": CONV2D.output(problem, CPU)}
    with pytest.raises(TwinError, match=expected):
        for order in (Order(late=True), *(Order(seed=number, late=True) for number in range(1, 6))):
            bind(recipe, tensors, options=TwinOptions(order, checks=True))()


def test_nan_and_infinity_reach_the_pixels_that_see_them_and_no_others(seed: int) -> None:
    """Not those of the next row, into which the same window extends."""
    problem = half(1, 64, 4, 6, 64, 1, 2, padding=(0, 1), relu=True)
    inputs = CONV2D.inputs(problem, CPU, seed)
    inputs["weight"] = inputs["weight"].abs() + 0.1
    inputs["x"][0, 0, 1, 5], inputs["x"][0, 5, 3, 0] = torch.nan, torch.inf
    for columns in (4, 7):
        y = CONV2D.output(problem, CPU)
        bind(WINDOW.recipe(problem, config(problem, 2, columns)), {**inputs, "y": y})()
        assert y[0, :, 1, 5:].isnan().all() and y.isnan().sum() == 2 * 64
        assert y[0, :, 3, :2].isinf().all() and y.isinf().sum() == 2 * 64


def test_the_result_may_overwrite_the_residual(seed: int) -> None:
    """A tile reads of the residual exactly what it stores, and nothing of its neighbors."""
    problem = half(2, 64, 5, 9, 64, 3, 3, padding=(1, 1), residual=True)
    inputs = CONV2D.inputs(problem, CPU, seed)
    for columns in (4, 9):
        recipe = WINDOW.recipe(problem, config(problem, 2, columns))
        y, residual = (
            CONV2D.output(problem, CPU),
            inputs["residual"].clone(memory_format=torch.preserve_format),
        )
        bind(recipe, {**inputs, "y": y})()
        bind(recipe, {**inputs, "residual": residual, "y": residual}, options=TwinOptions(checks=True))()
        assert torch.equal(residual, y)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "tf32"}, "fp16, bf16"),
        ({"dtype": "fp8"}, "not fp8; persistent does"),
        ({"layout": "nchw"}, "layout nhwc"),
        ({"groups": 2}, "groups=1"),
        ({"stride": (2, 1)}, "stride 1"),
        ({"channels": 128}, "64 channels"),
        ({"filters": 96}, "multiples of 64"),
        ({"filter_height": 7, "filter_width": 7}, "49 taps"),
        ({"dilation": (100, 1), "padding": (100, 1)}, "windows of at least 201x3"),
        ({"shortcut_channels": 64}, "shortcut"),
        ({"height": 1, "width": 1, "batch": 2**31 - 1}, "32 bits"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], reason: str) -> None:
    assert WINDOW.supports(LARGE) is None
    assert reason in (WINDOW.supports(replace(LARGE, **changes)) or "")


def test_it_is_for_hopper_alone() -> None:
    assert (
        WINDOW.on(typical_card("sm_90a")).refusal(LARGE) is None
        and WINDOW.on(typical_card(None)).refusal(LARGE) is None
    )
    assert "sm_90a" in (WINDOW.on(typical_card("sm_100")).refusal(LARGE) or "")


@pytest.mark.parametrize("size", [1, 7, 14, 28, 56, 57, 224, 1000])
@pytest.mark.parametrize("batch", [1, 32])
def test_configs_suit_every_image(size: int, batch: int) -> None:
    problem = replace(LARGE, height=size, width=size, batch=batch)
    configs = WINDOW.configs(problem)
    assert configs and len(set(configs)) == len(configs)
    for each in configs:
        assert isinstance(each, WindowConfig) and each.stages >= 2
        (call,) = WINDOW.recipe(problem, each).steps
        assert isinstance(call, KernelCall) and call.shared_bytes <= HOPPER_SHARED


def test_large_batches_get_large_tiles_and_small_ones_many() -> None:
    assert WINDOW.configs(LARGE)[0] == WindowConfig(4, 56, 2)
    one = replace(LARGE, batch=1)
    (call,) = WINDOW.recipe(one, WINDOW.configs(one)[0]).steps
    assert isinstance(call, KernelCall) and call.grid[0] > 100


@pytest.mark.parametrize(
    ("name", "first", "measured"),
    [
        ("64to64_56_k3s1_b1_bias+relu", (2, 14), 3.16),
        ("64to64_56_k3s1_b8_bias+relu", (7, 14), 5.60),
        ("64to64_56_k3s1_b8_bias+res+relu", (7, 14), 6.20),
        ("64to64_56_k3s1_b32_bias+relu", (7, 28), 13.03),
        ("64to64_56_k3s1_b256_bias+relu", (4, 56), 84.3),
        ("64to64_56_k3s1_b256_bias+res+relu", (4, 56), 91.8),
    ],
)
def test_the_first_config_is_what_was_fastest_on_an_h200(
    name: str, first: tuple[int, int], measured: float
) -> None:
    problem = Conv2dProblem.parse(name, "fp16", "nhwc")
    chosen = WINDOW.configs(problem)[0]
    assert isinstance(chosen, WindowConfig) and (chosen.rows, chosen.columns) == first
    assert WINDOW.estimate(problem, chosen) == pytest.approx(measured, rel=0.1)


@pytest.mark.share(7)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_the_first_configs_do_not_spill(dtype: str, sample: Sample) -> None:
    for batch in (1, 256):
        problem = replace(LARGE, dtype=dtype, batch=batch, **EPILOGUE)
        for each in sample(WINDOW.configs(problem)[:3], 1):
            (kernel,) = WINDOW.recipe(problem, each).programs
            assert compile_program(kernel, "sm_90a").resources.spill_bytes == 0, each


def test_every_width_compiles(sample: Sample) -> None:
    """Without a reach, the columns of a tile are those of the product."""
    problem = half(1, 64, 1, 256, 64, 1, 1, bias=True)
    for width in sample(WIDTHS, 3):
        (kernel,) = WINDOW.recipe(problem, WindowConfig(1, width, 2)).programs
        assert dict(kernel.constants)["WGMMA_N"] == width
        assert compile_program(kernel, "sm_90a").resources.spill_bytes == 0
