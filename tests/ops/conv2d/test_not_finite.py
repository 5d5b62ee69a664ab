"""NaN, infinities and overflow through every rung of conv2d, as documented in docs/non-finite.md."""

from __future__ import annotations

import pytest
import torch

from escalade.device.run import bind
from escalade.ops import OPERATIONS, Rung
from escalade.ops.base.dtypes import QUANTIZED, STORAGE
from escalade.ops.conv2d import Conv2dProblem
from tests import formulas
from tests.support import SHARE, all_rungs, cover, label, supported

CPU = torch.device("cpu")
CONV2D = OPERATIONS["conv2d"]
SPLIT = ("tensor_core_split", "wgmma_split")
"""Halves of an infinity: infinity and NaN. Non-finite values stay non-finite, as either."""
SPREAD = ("winograd", "fft")
"""Sums over the pixels of a tile or an image: non-finite values spread to other outputs there."""
HALF = ("half_storage",)
"""x and weights are rounded to fp16 first, where larger values become infinite."""
each_rung = pytest.mark.parametrize("rung", CONV2D.ladder.rungs, ids=label)


def problem_for(rung: Rung[Conv2dProblem]) -> Conv2dProblem:
    """Problems on which all rungs run, to save compilations; the smallest that the formula covers."""
    turn = [other.name for _, other in all_rungs()].index(rung.name)
    known = cover(CONV2D, rung, CONV2D.small_problems, turn, SHARE)
    known += [v for variants in supported(CONV2D, rung, CONV2D.small_problems) for v in variants]
    plain = [
        p
        for p in known
        if p.dilation == (1, 1)
        and not p.shortcut_channels
        and p.dtype not in QUANTIZED
        and p.output_elements
        and not (p.prologue or p.activation)
        and p.output_pixels > 2 * seen_by(p)
    ]
    return min(plain[:4], key=lambda problem: problem.flops)


def seen_by(problem: Conv2dProblem) -> int:
    """Return the most output pixels that read one input pixel: two poisoned pixels may not reach every output."""
    rows, columns = problem.stride
    return -(-problem.filter_height // rows) * -(-problem.filter_width // columns)


def run(rung: Rung[Conv2dProblem], problem: Conv2dProblem, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    recipe = rung.recipe(problem, rung.configs(problem)[0])
    workspaces = {workspace.name: workspace.allocate(CPU) for workspace in recipe.workspaces}
    y = CONV2D.output(problem, CPU)
    bind(recipe, {**inputs, **workspaces, "y": y}, rung.name)()
    return y


def by_definition(
    rung: Rung[Conv2dProblem], problem: Conv2dProblem, inputs: dict[str, torch.Tensor]
) -> torch.Tensor:
    p, x, weight = problem, inputs["x"], inputs["weight"]
    if rung.name in HALF:
        x, weight = x.half(), weight.half()
    y = formulas.convolution(x, weight, inputs.get("bias"), p.stride, p.padding, p.groups)
    if p.residual:
        y = y + inputs["residual"].double()
    return (formulas.relu(y) if p.relu else y).to(STORAGE[p.dtype])


def require_as_promised(rung: Rung[Conv2dProblem], result: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {torch.float32: 2e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}[result.dtype]
    if rung.name.startswith(SPREAD):
        harmed = ~expected.isfinite().flatten(1).all(1)
        assert result[~harmed].isfinite().all(), "it reached another image"
        taken = ~result.isfinite() & harmed.view(-1, 1, 1, 1)
    elif rung.name in SPLIT:
        taken = ~result.isfinite() & ~expected.isfinite()
    else:
        taken = torch.zeros_like(result, dtype=torch.bool)
    assert not (result.isfinite() & ~expected.isfinite()).any(), "it made a number of what is none"
    torch.testing.assert_close(
        result[~taken], expected[~taken], rtol=tolerance, atol=tolerance, equal_nan=True
    )


@pytest.mark.share(7)
@each_rung
def test_nan_and_infinity_reach_what_sees_them_and_nothing_else(rung: Rung[Conv2dProblem]) -> None:
    problem = problem_for(rung)
    inputs = CONV2D.inputs(problem, CPU, 1)
    x = inputs["x"]
    x[0, 0, problem.height // 2, problem.width // 2] = torch.nan
    x[-1, -1, 0, 0] = -torch.inf
    expected = by_definition(rung, problem, inputs)
    assert expected.isnan().any() and expected.isfinite().any()
    require_as_promised(rung, run(rung, problem, inputs), expected)


@pytest.mark.share(7)
@each_rung
def test_what_is_too_large_is_infinite(rung: Rung[Conv2dProblem]) -> None:
    """Sums of 1.8 times the largest number; at the borders, where windows see less, they stay finite."""
    problem = problem_for(rung)
    inputs = CONV2D.inputs(problem, CPU, 1)
    inputs["x"].fill_(0.9 * torch.finfo(STORAGE[problem.dtype]).max)
    inputs["weight"].fill_(2 / problem.depth)
    expected = by_definition(rung, problem, inputs)
    assert expected.isinf().any()
    require_as_promised(rung, run(rung, problem, inputs), expected)
