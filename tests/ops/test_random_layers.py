"""Random convolutions and their gradients: by the rung that an H200 would run and by another one, on the twin."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade.device.run import TwinOptions
from escalade.device.twin import Order
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS
from escalade.ops.base.card import H200
from escalade.ops.base.operation import Operation
from escalade.ops.base.rung import Rung
from escalade.ops.choose.choice import choose
from escalade.ops.conv2d import Conv2dProblem
from escalade.ops.conv2d_input_gradient import Conv2dInputGradientProblem
from escalade.ops.conv2d_weight_gradient import Conv2dWeightGradientProblem
from escalade.tune.verification import VerificationCase

PER_DAY = 6
MOST_FLOPS = 2**23
"""Of a problem: the twin checks some 10^6 products per second."""
CHANNELS = (1, 3, 4, 8, 12, 16, 24, 32, 32, 40, 48, 64, 64, 72, 80, 96, 128, 192)
KERNELS = ((1, 1), (1, 1), (3, 3), (3, 3), (3, 3), (5, 5), (1, 7), (7, 1), (2, 2), (4, 4))


def draw(number: int) -> tuple[Operation[Any], Any, Rung[Any], Any, str]:
    """Return an operation, a problem, a rung that supports it and a config: the choice of an H200, or any other."""
    numbers = random.Random(number)
    while True:
        name = numbers.choice(("conv2d", "conv2d", "conv2d_input_gradient", "conv2d_weight_gradient"))
        operation = OPERATIONS[name]
        try:
            problem = _problem(numbers, operation)
            chosen = choose(operation, problem, H200)
        except UnsupportedError:
            continue
        if problem.flops > MOST_FLOPS or chosen.rung.name == "pytorch":
            continue
        if number % 2:
            return operation, chosen.problem, chosen.rung, chosen.config, "chosen"
        rungs = [rung for rung in operation.ladder.on(H200) if rung.refusal(problem) is None]
        if not rungs:  # the choice is for another layout
            continue
        rung = numbers.choice(rungs)
        return operation, problem, rung, numbers.choice(rung.configs(problem)), "any"


def _problem(numbers: random.Random, operation: Operation[Any]) -> Any:
    channels, filters = numbers.choice(CHANNELS), numbers.choice(CHANNELS)
    groups = numbers.choice((1, 1, 1, 1, 1, 2, 4, channels))
    if groups > 1:
        filters = channels * numbers.choice((1, 1, 2))
    height, width = numbers.choice(KERNELS)
    step = numbers.choice((1, 1, 1, 2))
    forward = Conv2dProblem(
        numbers.randint(1, 3), channels, numbers.randint(height, 20), numbers.randint(width, 20), filters, height,
        width, (step, step), numbers.choice(((0, 0), (height // 2, width // 2))),
        dtype=numbers.choice(operation.dtypes), layout=numbers.choice(("nhwc", "nhwc", "nchw")), groups=groups,
    )  # fmt: skip
    if operation.name == "conv2d":
        return replace(
            forward, bias=numbers.random() < 0.7, relu=numbers.random() < 0.5, residual=numbers.random() < 0.2
        )
    if operation.name == "conv2d_input_gradient":
        return Conv2dInputGradientProblem(forward)
    return Conv2dWeightGradientProblem(forward)


def failure(number: int) -> str:
    """Run the layer of a number; return what is wrong with it."""
    operation, problem, rung, config, how = draw(number)
    case = VerificationCase(operation, problem, torch.device("cpu"), number)
    late = number % 4 < 2
    outcome = case.check(rung, problem.layout, config, TwinOptions(Order(number, late), checks=True))
    label = f"{number}: {operation.name} {problem.name} {problem.dtype} {problem.layout} {rung.name} ({how}), {config}"
    return "" if outcome.passed else f"{label}: {outcome.failure}"


@pytest.mark.parametrize("which", range(PER_DAY))
def test_layers_of_the_day_are_right(which: int, request: pytest.FixtureRequest) -> None:
    found = failure(request.config.option.sample.toordinal() * PER_DAY + which)
    assert not found, found
