"""Group normalization as an operator: its messages, gradient, choices, and non-finite values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from escalade import ops
from escalade.device.recipe import KernelCall
from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Order
from escalade.errors import UnsupportedError
from escalade.ops.base.card import TWIN
from escalade.ops.base.draw import Draw
from escalade.ops.base.rung import Rung
from escalade.ops.choose.choice import choose
from escalade.ops.group_norm import GROUP_NORM, GroupNormProblem, SpanConfig, random_inputs
from tests.support import check, label


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
def test_images_of_both_orders(format: torch.memory_format) -> None:
    x = torch.randn(2, 8, 3, 5).contiguous(memory_format=format)
    weight, bias = torch.randn(8), torch.randn(8)
    y = ops.group_norm(x, 4, weight, bias, 1e-3)
    torch.testing.assert_close(y, F.group_norm(x, 4, weight, bias, 1e-3))
    assert y.is_contiguous(memory_format=format)
    torch.testing.assert_close(ops.group_norm(x, 8), F.instance_norm(x))
    assert ops.group_norm(x[:0], 4).shape == (0, 8, 3, 5)


def test_the_gradient_is_pytorchs() -> None:
    given = [torch.randn(2, 8, 3, 3), torch.randn(8), torch.randn(8)]
    results = []
    for run in (lambda x, w, b: ops.group_norm(x, 2, w, b), lambda x, w, b: F.group_norm(x, 2, w, b)):
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        run(*leaves).square().sum().backward()
        results.append([leaf.grad for leaf in leaves])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("rung", [rung.name for rung in GROUP_NORM.ladder.rungs])
def test_a_group_that_is_not_finite_stays_alone(rung: str) -> None:
    x = torch.randn(2, 8, 4, 4)
    x[0, 1, 2, 3], x[1, 7, 0, 0] = torch.nan, torch.inf
    y = ops.group_norm(x, 2, rung=rung)
    assert y[0, :4].isnan().all() and y[1, 4:].isnan().all()
    assert y[0, 4:].isfinite().all() and y[1, :4].isfinite().all()


@pytest.mark.parametrize("rung", [rung.name for rung in GROUP_NORM.ladder.rungs])
def test_a_large_mean_does_not_cancel(rung: str) -> None:
    x = torch.randn(1, 8, 9, 9) + 3000.0
    expected = F.group_norm(x.double(), 2).float()
    torch.testing.assert_close(ops.group_norm(x, 2, rung=rung), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rung", GROUP_NORM.ladder.rungs, ids=label)
def test_pixels_may_lie_apart(rung: Rung[GroupNormProblem], seed: int) -> None:
    problem = GroupNormProblem(2, 12, 4, 4, 2, x_pitch=24, y_pitch=16, dtype="fp16")
    assert GroupNormProblem.parse(problem.name) == replace(problem, dtype="fp32")
    if rung.name in ("staged", "streamed"):
        assert "layout nchw" in str(rung.supports(problem))
        return
    check(GROUP_NORM, rung, problem, rung.configs(problem)[0], torch.device("cpu"), seed)


@pytest.mark.parametrize("multiprocessors", [1, 2, 132])
def test_streamed_rows_leave_their_counters_at_zero(multiprocessors: int) -> None:
    """Statistics of some rows and results of others alternate, on cards with more and with fewer rows in flight."""
    problem = GroupNormProblem(3, 8, 40, 47, 2, layout="nchw", relu=True)
    rung = GROUP_NORM.ladder.on(replace(TWIN, multiprocessors=multiprocessors)).rung("streamed")
    inputs = random_inputs(problem, Draw(torch.device("cpu"), 1))
    y = torch.full_like(inputs["x"], torch.nan)
    config = SpanConfig(256, 2, 1)
    recipe = rung.recipe(problem, config)
    (step,) = recipe.steps
    assert isinstance(step, KernelCall)
    assert {1: 2, 2: 3, 132: 6}[multiprocessors] == step.arguments[-4], "rows of lag"
    expected = F.group_norm(
        inputs["x"].double(), 2, inputs["weight"].double(), inputs["bias"].double()
    ).relu()
    call = bind(recipe, {**inputs, "y": y})
    first = None
    for _ in range(3):
        y.fill_(torch.nan)
        call()
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)
        assert first is None or torch.equal(first, y)
        first = y.clone()


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_staged_blocks_take_row_after_row(dtype: str, seed: int) -> None:
    """With checks, on a card where one CTA has five rows, so that both of its buffers are refilled."""
    problem = GroupNormProblem(1, 10, 9, 13, 5, layout="nchw", dtype=dtype)
    rung = GROUP_NORM.ladder.on(replace(TWIN, multiprocessors=1, registers=1)).rung("staged")
    options = TwinOptions(order=Order(seed=seed, late=True), checks=True)
    config = rung.configs(problem)[0]
    (step,) = rung.recipe(problem, config).steps
    assert isinstance(step, KernelCall) and step.grid == (1, 1, 1)
    check(GROUP_NORM, rung, problem, config, torch.device("cpu"), seed, options)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(UnsupportedError, match="3 groups of 8 channels"):
        ops.group_norm(torch.randn(2, 8, 2, 2), 3)
    with pytest.raises(UnsupportedError, match=r"weight is torch.float32 \[7\]"):
        ops.group_norm(torch.randn(2, 8, 2, 2), 2, torch.randn(7))
    with pytest.raises(UnsupportedError, match="epsilon"):
        ops.group_norm(torch.randn(2, 8, 2, 2), 2, epsilon=-1.0)
    with pytest.raises(UnsupportedError, match="the form is"):
        GroupNormProblem.parse("96_5_b3")


@pytest.mark.parametrize(
    ("name", "rung"),
    [
        ("512_7_b32_g32", "in_registers"),
        ("256_56_b32_g32", "clustered"),
        ("64_256_b8_g64", "split"),
        ("64_56_b32_g1", "split"),
        ("512_8_b1_g1", "clustered"),
        ("5001_2_b1_g1", "naive"),
    ],
)
def test_what_fits_into_registers_is_read_once(name: str, rung: str) -> None:
    problem = GroupNormProblem.parse(name)
    assert choose(GROUP_NORM, problem, torch.device("cpu")).rung.name == rung
