"""Candidates' times, the winner, and candidates excluded because their timed results are wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade import ops
from escalade.device import packing
from escalade.device.recipe import Recipe
from escalade.device.timing import Subject, Timing
from escalade.errors import UnsupportedError
from escalade.ops.base.cards import typical_card
from escalade.tune import search
from escalade.tune.search import Candidate, Trial
from tests.bench.fake import Scale, ScaleProblem, rung

CPU = torch.device("cpu")
PROBLEM = ScaleProblem(100)


@pytest.mark.parametrize(
    ("operation", "name", "rung", "timed"),
    [
        # Packs the weights and then convolves.
        ("stem", "3to16_23_k7s2_fp32_nchw_b1_relu", "tensor_core", [False]),
        # Rotates the filter and then convolves, at every call.
        ("conv2d_input_gradient", "16to16_7_k3s1_b1", "tensor_core", [True]),
    ],
)
def test_steps_that_depend_on_weights_alone_count_if_weights_change(
    operation: str, name: str, rung: str, timed: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ops.operation(operation)
    problem = replace(asked.parse(name), dtype="fp16", layout="nhwc")
    candidate = Candidate(asked.ladder.rung(rung), asked.ladder.rung(rung).configs(problem)[0])
    once = candidate.rung.recipe(problem, candidate.config).packing
    assert once.steps
    ran: list[Recipe] = []

    class Spy(packing.Executable):
        def __init__(self, recipe: Recipe, *rest: Any, **flags: Any) -> None:
            ran.append(recipe)
            super().__init__(recipe, *rest, **flags)

    monkeypatch.setattr(packing, "Executable", Spy)
    trial = Trial(asked, problem, CPU, [candidate], seed=0)
    assert trial.right == [candidate.name]
    assert [once.steps[0] in recipe.steps for recipe in ran if recipe != once] == timed


@pytest.fixture
def scales(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An operation of two rungs with three configs each, and its candidates' names."""
    monkeypatch.setattr(ops, "OPERATIONS", {"scale": Scale(rung("one"), rung("two"))})
    return [
        candidate.name for candidate in search.candidates(ops.operation("scale"), PROBLEM, typical_card(None))
    ]


Look = dict[str, float]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[Look, Look], list[list[str]]]:
    """Set the times of the first round and the final; return the names that were timed in each."""

    def install(first: Look, final: Look) -> list[list[str]]:
        rounds: list[list[str]] = []

        def fake(subjects: Sequence[Subject], *rest: Any, **settings: Any) -> dict[str, Timing]:
            told = final if rounds else first
            rounds.append([subject.name for subject in subjects])
            return {subject.name: Timing(told[subject.name], 0.0, 99.0, 3, "graph") for subject in subjects}

        monkeypatch.setattr(search, "time_interleaved", fake)
        return rounds

    return install


@pytest.mark.parametrize("shift", range(6))
def test_the_fastest_four_are_looked_at_again_and_the_fastest_of_them_is_kept(
    shift: int, scales: list[str], looks: Callable[[Look, Look], list[list[str]]]
) -> None:
    first = {name: 1.0 + (number + shift) % 6 for number, name in enumerate(scales)}
    ranked = sorted(first, key=lambda name: first[name])
    # The final ranks the third first, and would have ranked those first that are not in it.
    final = dict(zip(ranked, (5.0, 4.0, 3.0004, 6.0, 1.0, 0.5), strict=True))
    rounds = looks(first, final)
    entry = search.fastest(ops.operation("scale"), PROBLEM, CPU)
    assert sorted(rounds[0]) == sorted(scales) and sorted(rounds[1]) == sorted(ranked[:4])
    winner = next(
        c
        for c in search.candidates(ops.operation("scale"), PROBLEM, typical_card(None))
        if c.name == ranked[2]
    )
    assert (entry.rung, entry.config, entry.median_us) == (winner.rung.name, winner.config.as_dict(), 3.0)


def test_samples_are_the_times_of_their_own_candidates(
    scales: list[str], looks: Callable[[Look, Look], list[list[str]]]
) -> None:
    times = {name: 10.0 + number for number, name in enumerate(scales)}
    looks(times, {})
    found = search.samples(ops.operation("scale"), PROBLEM, CPU)
    assert [sample.us for sample in found] == [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]
    assert {sample.of for sample in found} == {6} and [sample.rung for sample in found] == ["one"] * 3 + [
        "two"
    ] * 3


class Idle(packing.Executable):
    """Does nothing when timed; plain runs are unaffected."""

    def bind(self, tensors: Any) -> Any:
        return lambda: None


def test_a_subject_that_does_nothing_when_timed_does_not_win(
    scales: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = packing.Executable
    monkeypatch.setattr(
        packing, "Executable", lambda recipe, device, name, **flags: (Idle if "one" in name else real)(
            recipe, device, name, **flags
        )
    )  # fmt: skip
    entry = search.fastest(ops.operation("scale"), PROBLEM, CPU)
    assert entry.rung == "two"
    by_rung = {sample.rung: sample for sample in search.samples(ops.operation("scale"), PROBLEM, CPU)}
    assert by_rung["one"].us is None and "the timed results are wrong: 100 of 100" in by_rung["one"].failure
    assert by_rung["two"].us is not None and not by_rung["two"].failure
    monkeypatch.setattr(packing, "Executable", Idle)
    with pytest.raises(
        UnsupportedError, match="no rung computes scale scale_100: one .*the timed results are wrong"
    ):
        search.fastest(ops.operation("scale"), PROBLEM, CPU)
