"""TF32's errors have either sign: a deep network would add up errors of one sign."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from escalade.device.run import bind
from escalade.ops import OPERATIONS
from escalade.ops.conv2d import Conv2dProblem

CPU = torch.device("cpu")
CONV2D = OPERATIONS["conv2d"]
WHOLE = Conv2dProblem(1, 64, 8, 8, 64, 3, 3, padding=(1, 1), dtype="tf32", layout="nhwc")
PADDED = Conv2dProblem(1, 33, 8, 8, 32, 1, 1, dtype="tf32", layout="nhwc")
CASES = {
    "rounded": ("fused_epilogue", WHOLE),
    "truncated": ("persistent", WHOLE),
    "truncated_window": ("streamed_window", WHOLE),
    "rounded_where_copied": ("persistent", PADDED),
}


@pytest.mark.parametrize(("name", "problem"), CASES.values(), ids=CASES)
def test_results_are_not_smaller_on_average(name: str, problem: Conv2dProblem, seed: int) -> None:
    """Products of positive numbers, which hide no error: truncating an operand would cost 3.4e-4 of every result."""
    rung = CONV2D.ladder.rung(name)
    assert rung.supports(problem) is None
    inputs = {key: value.abs() for key, value in CONV2D.inputs(problem, CPU, seed).items()}
    recipe = rung.recipe(problem, rung.configs(problem)[0])
    workspaces = {workspace.name: workspace.allocate(CPU) for workspace in recipe.workspaces}
    y = CONV2D.output(problem, CPU)
    bind(recipe, {**inputs, **workspaces, "y": y}, name)()
    x, weight = (inputs[key].double() for key in ("x", "weight"))
    exact = F.conv2d(x, weight, padding=problem.padding)
    assert abs(float((y.double() - exact).sum() / exact.sum())) < 6e-5
