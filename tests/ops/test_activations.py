"""Fused activations: their names, and that every rung applies them."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from escalade.device.recipe import KernelCall
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, Operation, Rung
from escalade.ops.conv2d import Conv2dProblem
from escalade.ops.shared import activation
from tests.support import Sample, check, label, supported

CPU = torch.device("cpu")
SHARE = 12
"""One in this many rungs runs, others every time; `--thorough` runs all."""
SILU, OTHER = "silu(x)", "t0 = x + 0.5; where(t0 > 0, t0, 0.25 * tanh(t0))"
RESIDUAL = ("silu(x) + residual", "residual * sigmoid(x)")
ACTIVATED = [
    operation
    for operation in OPERATIONS.values()
    if "activation" in {field.name for field in fields(operation.problem)}
]
PLAIN = Conv2dProblem.square(8, 16, 9, 3, bias=True)


def _problems(operation: Operation[Any]) -> list[Any]:
    """Return the small problems whose results are numbers, not indices."""
    return [one for one in operation.small_problems if getattr(one, "kind", "") not in ("argmax", "argmin")]


def _cases(operation: Operation[Any], residual: bool = False) -> list[tuple[Rung[Any], Any]]:
    """Every rung with the cheapest small problem with an activation that it supports, with alternating dtypes."""
    cases = []
    for turn, rung in enumerate(operation.ladder):
        text = (RESIDUAL if residual else (SILU, OTHER))[turn % 2]
        problems = [one for one in _problems(operation) if one.batch and (not residual or one.residual)]
        activated = tuple(replace(problem, relu=False, activation=text) for problem in problems)
        offered = supported(operation, rung, activated)
        if residual and not offered:
            continue  # it adds none
        cheapest = min(offered, key=lambda variants: variants[0].flops)
        cases.append((rung, cheapest[turn % len(cheapest)]))
    return cases


@pytest.mark.parametrize("operation", ACTIVATED, ids=label)
def test_a_rung_applies_an_activation(operation: Operation[Any], seed: int, sample: Sample) -> None:
    cases = _cases(operation)
    for rung, problem in sample(cases, 1 + len(cases) // SHARE):
        check(operation, rung, problem, rung.configs(problem)[0], CPU, seed)


@pytest.mark.parametrize("name", ["conv2d", "batch_norm"])
def test_an_activation_may_say_what_becomes_of_the_residual(name: str, seed: int, sample: Sample) -> None:
    operation = OPERATIONS[name]
    cases = _cases(operation, residual=True)
    for rung, problem in sample(cases, 1 + len(cases) // SHARE):
        check(operation, rung, problem, rung.configs(problem)[0], CPU, seed)


@pytest.mark.parametrize("operation", ACTIVATED, ids=label)
def test_every_rung_has_a_kernel_that_activates(operation: Operation[Any]) -> None:
    for rung, problem in _cases(operation):
        for asked, expected in ((problem, True), (replace(problem, activation=""), False)):
            steps = rung.recipe(asked, rung.configs(asked)[0]).steps
            programs = [step.program for step in steps if isinstance(step, KernelCall)]
            activating = [
                one for one in programs
                if "EXPRESSION" in dict(one.constants) and "common/expression.cuh" in one.headers()
            ]  # fmt: skip
            assert bool(activating) is expected, rung.name


@pytest.mark.parametrize("operation", ACTIVATED, ids=label)
@pytest.mark.parametrize("text", [SILU, OTHER, "clamp(x, -1e-05, 6)"])
def test_a_name_has_the_activation(operation: Operation[Any], text: str) -> None:
    for problem in _problems(operation):
        plain = replace(problem, relu=False, activation="")
        activated = replace(plain, activation=text)
        spelled = f"[{text.replace(' ', '')}]"
        assert spelled in activated.name and activated.name.replace(spelled, "") == plain.name
        again = operation.problem.parse(activated.name)
        assert replace(again, dtype=activated.dtype, layout=activated.layout) == activated


def test_there_is_one_way_to_say_an_activation() -> None:
    assert replace(PLAIN, activation="relu(x)") == replace(PLAIN, relu=True)
    assert replace(PLAIN, activation="x") == PLAIN
    assert replace(PLAIN, activation="silu( x )") == replace(PLAIN, activation=SILU)


@pytest.mark.parametrize("text", ["silu(y)", "x, x", "x * y", "3.0", "silu(", "spam(x)", "x + residual"])
def test_what_is_no_activation_is_said(text: str) -> None:
    with pytest.raises(UnsupportedError):
        replace(PLAIN, activation=text)


def test_relu_and_an_activation_are_one_too_many() -> None:
    with pytest.raises(UnsupportedError, match="ReLU and activation"):
        replace(PLAIN, relu=True, activation=SILU)


def test_a_kernel_without_an_expression_has_no_word_of_one() -> None:
    assert activation.constants_of(PLAIN) == {"HAS_RELU": False}
    assert activation.constants_of(replace(PLAIN, activation=SILU))["FAST_FUNCTIONS"] is False
    assert activation.constants_of(replace(PLAIN, activation=SILU, dtype="bf16"))["FAST_FUNCTIONS"] is True
