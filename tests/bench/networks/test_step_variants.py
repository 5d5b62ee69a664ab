"""Variants of a training step: each is verified, and both studies become tables."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from escalade import models, training_step
from escalade.engine.training.settings import TECHNIQUES
from escalade.errors import UnsupportedError
from escalade_bench.measure.records import Record
from escalade_bench.networks import training_step as step_variants
from escalade_bench.networks.measurement import Case
from escalade_bench.networks.training_step import exact, made, standard
from escalade_bench.peers.network import Task
from escalade_bench.peers.torch_training_step import Lesson
from escalade_bench.report.document import markdown
from escalade_bench.report.pages import training


def test_every_variant_is_right_and_those_that_change_nothing_are_told_apart() -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 3, 8, 8)
    lesson = Lesson(models.ConvAutoencoder(4).train(), F.mse_loss, x, x, "fp32", 1e-2, 1.0)
    case = Case("steps", Task(lesson.model, x, "fp32"), standard(lesson, exact(lesson), 4.0), 0.0)
    variants = [tuple(TECHNIQUES), ("batch_norm_training",)]
    records = step_variants.compared(case, step_variants.without(lesson, variants), lambda text: None)
    assert [r.rung for r in records] == ["all", "none", "without batch_norm_training"]
    assert all(not r.failure and r.system == "escalade" and r.wall_us for r in records)
    used = step_variants.changing(records)
    assert "epilogues" in used and "graph" in used and "batch_norm_training" not in used
    first, *_, last = TECHNIQUES
    assert step_variants.name_of([name for name in TECHNIQUES if name != last]) == f"only {last}"
    assert step_variants.name_of((first, last)) == f"without {first} and {last}"


def test_an_unknown_technique_is_refused() -> None:
    model, x = models.ConvAutoencoder(4).train(), torch.rand(1, 3, 4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for wrong in (("magic",), "graph"):
        with pytest.raises(UnsupportedError, match="without=.* rungs, .*casts, "):
            training_step(model, F.mse_loss, optimizer, (x, x), without=wrong)


def _record(rung: str, us: float, plan: str) -> Record:
    return Record(
        "autoencoder_training_ablation", "32_b64", "fp16", "nhwc", 64, "escalade", rung, {"plan": plan}, "graph",
        median_us=us, wall_us=us + 10, gpu="NVIDIA H200", commit="abc", date="2026-01-02T03:04:05+00:00",
    )  # fmt: skip


def test_the_techniques_that_gain_most_are_paired() -> None:
    names = [f"t{i}" for i in range(8)]
    records = [_record(f"without {name}", 100.0 + 7 * i % 8, "p") for i, name in enumerate(names)]
    slowest = sorted(names, key=lambda name: 7 * names.index(name) % 8)[-6:]
    assert step_variants.strongest(records, names) == [name for name in names if name in slowest]


def test_techniques_and_pairs_become_tables() -> None:
    records = [
        _record("all", 100.0, "a"), _record("none", 1000.0, "n"), _record("only epilogues", 800.0, "o"),
        _record("without epilogues", 150.0, "e"), _record("without pointwise", 120.0, "p"),
        _record("without casts", 101.0, "a"), _record("without pointwise and epilogues", 160.0, "b"),
    ]  # fmt: skip
    text = markdown(training.techniques(records))
    assert "#### Techniques, 32_b64, fp16" in text
    assert "| `all` |  | 110.0 | 10.00× |" in text
    row = next(line for line in text.splitlines() if line.startswith("| `epilogues` |"))
    assert row.endswith("| 810.0 | 1.25× | 160.0 | 1.50× |  | abc 01-02 |")
    assert "| `casts` |" not in text, "its plan is that of the whole"
    # Both gain 1.60, alone 160 / 150 and 160 / 120: 1.60 / (1.07 * 1.33) = 1.13.
    assert "| `pointwise and epilogues` |  |  |  | 170.0 | 1.60× | 1.13 | abc 01-02 |" in text
    assert "not been measured yet" in markdown(training.techniques([]))


def test_a_step_that_is_fed_from_the_host_is_judged_like_any_other() -> None:
    torch.manual_seed(0)
    x = torch.rand(2, 3, 8, 8)
    lesson = Lesson(models.ConvAutoencoder(4).train(), F.mse_loss, x, x, "fp32", 1e-2, 1.0)
    case = Case("pairs", Task(lesson.model, x, "fp32"), standard(lesson, exact(lesson), 4.0), 0.0)
    pupil, step = made(lesson, "nhwc")
    other = replace(lesson, target=x + 0.01)
    calls = {
        "right": step_variants.fed(lesson, step, "pageable, one stream"),
        "wrong": step_variants.fed(other, step, "pageable, one stream"),
    }
    variants = ((name, partial(pupil.peer, name, "nhwc", call)) for name, call in calls.items())
    found = {r.rung: r for r in step_variants.compared(case, variants, lambda text: None)}
    assert not found["right"].failure and found["right"].system == "escalade" and found["right"].wall_us
    assert "its error is" in found["wrong"].failure


def test_pairs_become_a_table() -> None:
    pageable = Record(
        "autoencoder_training_pairs", "32_b256", "fp16", "nhwc", 256, "escalade", "pageable, one stream",
        timing="calls", median_us=1500.0, gpu="NVIDIA H200", commit="abc", date="2026-01-02T03:04:05+00:00",
    )  # fmt: skip
    pinned = replace(pageable, rung="pinned, two streams", median_us=750.0)
    broken = replace(pageable, rung="one arena", median_us=None, failure="its error is 3")
    text = markdown(training.pairs([pageable, pinned, broken]))
    assert "| A batch from host memory, and a step | pinned, two streams | 750.0 | 2.00× |" in text
    assert "| A step launched kernel by kernel | one arena | its error is 3 |  |" in text
    assert "not been measured yet" in markdown(training.pairs([]))
