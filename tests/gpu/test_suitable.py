"""Every rung is covered by the tests that need a GPU, or has a reason; this test needs none."""

from __future__ import annotations

import pytest

from escalade.ops import Rung
from escalade.ops.conv2d import Conv2dProblem
from escalade.ops.conv2d_input_gradient import Conv2dInputGradientProblem
from tests.gpu.suitable import (
    ARCHITECTURE,
    CONV2D,
    INPUT_GRADIENT,
    NOT_BEYOND_32_BITS,
    beyond_32_bits,
    input_gradient_beyond_32_bits,
    problem_for,
)
from tests.support import all_rungs, label

MOST_BYTES = 64 << 30
each_rung = pytest.mark.parametrize("rung", CONV2D.ladder.rungs, ids=label)


@each_rung
def test_every_rung_is_tried(rung: Rung[Conv2dProblem]) -> None:
    assert problem_for(rung) is not None


@each_rung
def test_every_rung_is_tried_beyond_32_bits_but_those_listed(rung: Rung[Conv2dProblem]) -> None:
    problem = beyond_32_bits(rung)
    assert (problem is None) == (rung.name in NOT_BEYOND_32_BITS)
    if problem is not None:
        workspaces = rung.recipe(problem, rung.configs(problem)[0]).workspaces
        assert problem.output_elements > 2**31
        assert problem.bytes + sum(workspace.bytes for workspace in workspaces) < MOST_BYTES


@pytest.mark.parametrize("rung", INPUT_GRADIENT.ladder.rungs, ids=label)
def test_every_rung_of_the_input_gradient_is_tried_beyond_32_bits(
    rung: Rung[Conv2dInputGradientProblem],
) -> None:
    problem = input_gradient_beyond_32_bits(rung)
    assert problem is not None and problem.elements > 2**31
    workspaces = rung.recipe(problem, rung.configs(problem)[0]).workspaces
    assert problem.bytes + sum(workspace.bytes for workspace in workspaces) < MOST_BYTES


def test_lists_name_rungs() -> None:
    assert NOT_BEYOND_32_BITS.keys() <= {rung.name for rung in CONV2D.ladder}


def test_one_card_can_run_every_rung() -> None:
    elsewhere = [rung.name for _, rung in all_rungs() if ARCHITECTURE not in rung.architectures]
    assert elsewhere == []
