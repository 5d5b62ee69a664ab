"""What a candidate's time counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade import ops
from escalade.device.recipe import Recipe
from escalade.tune import search
from escalade.tune.search import Candidate, Trial

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("operation", "name", "rung", "timed"),
    [
        # Packs the weights and then convolves.
        ("stem", "3to16_23_k7s2_fp32_nchw_b1_relu", "tensor_core", [False]),
        # Turns the filter around and then convolves, with every call.
        ("conv2d_input_gradient", "16to16_7_k3s1_b1", "tensor_core", [True]),
    ],
)
def test_what_depends_on_nothing_but_weights_counts_where_they_change(
    operation: str, name: str, rung: str, timed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ops.operation(operation)
    problem = replace(asked.parse(name), dtype="fp16", layout="nhwc")
    candidate = Candidate(asked.ladder.rung(rung), asked.ladder.rung(rung).configs(problem)[0])
    packing = candidate.rung.recipe(problem, candidate.config).packing
    assert packing.steps
    ran: list[Recipe] = []

    class Spy(search.Executable):
        def __init__(self, recipe: Recipe, *rest: Any, **flags: Any) -> None:
            ran.append(recipe)
            super().__init__(recipe, *rest, **flags)

    monkeypatch.setattr(search, "Executable", Spy)
    trial = Trial(operation, problem, CPU, [candidate], seed=0)
    assert trial.right == [candidate.name]
    assert [packing.steps[0] in recipe.steps for recipe in ran if recipe != packing] == timed
