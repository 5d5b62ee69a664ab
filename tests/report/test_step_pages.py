"""The page of a plan's steps: made of one run's records, whatever older ones have left."""

from __future__ import annotations

import pathlib
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from escalade.bench.networks.steps import step_records
from escalade.engine import compile
from escalade.engine.explain import Explanation, explain_plan
from escalade.measure import records as store
from escalade.measure.records import Provenance, Record
from escalade.report import step_pages

FIRST = Provenance(
    "NVIDIA H200", "580.1", {"torch": "2.11"}, "abc", "2026-01-02T03:04:05+00:00", "escalade explain resnet18"
)
SECOND = replace(FIRST, commit="def", date="2026-01-03T03:04:05+00:00")


@cache
def explained(batch: int = 1) -> Explanation:
    """A small plan that is called as the page's network is, with times made up."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16, 5))
    x = torch.randn(batch, 8, 4, 4)
    plan = compile(model, x, dtype="fp16", device="cpu").plan(x)
    explanation = replace(explain_plan(plan, lambda flops, moved, dtype: 0.5), title="resnet18")
    times = {step.name: 2.0 + step.number for step in explanation.steps if step.rung}
    return explanation.with_times(times, 4.25)


def stamped(explanation: Explanation, origin: Provenance) -> list[Record]:
    return [record.stamped(origin) for record in step_records(explanation)]


def test_without_records_the_page_says_that_nothing_was_measured() -> None:
    page = step_pages.steps_page({}, "h200")
    assert "It has not been measured yet" in page and f"`{step_pages.COMMAND} --results results`" in page


def test_every_step_has_a_row_and_the_plan_its_totals(tmp_path: pathlib.Path) -> None:
    explanation = explained()
    store.file_away(tmp_path, stamped(explanation, FIRST))
    page = step_pages.steps_page(store.load_folder(tmp_path), "h200")
    rows = [line for line in page.splitlines() if line.startswith("| ") and line[2].isdigit()]
    assert len(rows) == len(explanation.steps)
    conv = next(step for step in explanation.steps if step.operation == "conv2d")
    row = rows[conv.number - 1]
    for text in (conv.source, f"conv2d `{conv.problem}`", conv.rung, f"`{conv.kernels[0]}`", conv.why):
        assert text in row
    assert row.endswith(f"| {2.0 + conv.number:.2f} | 0.50 | {(2.0 + conv.number) / 0.5:.2f} |")
    assert "**4.25 µs**" in page and f"{len(rows)} steps" in page and "commit abc" in page
    assert f"| conv2d | {conv.rung} |" in page  # with what the rung says of itself
    assert "not been measured" not in page


def test_the_page_is_of_one_run(tmp_path: pathlib.Path) -> None:
    """A plan that has become shorter leaves records behind, which are no part of the new one."""
    explanation = explained()
    store.file_away(tmp_path, stamped(explanation, FIRST))
    shorter = replace(explanation, steps=explanation.steps[:-1])
    store.file_away(tmp_path, stamped(shorter, SECOND))
    found = store.load_folder(tmp_path)["h200"]
    assert {record.commit for record in found} == {"abc", "def"}
    run = step_pages.latest(found)
    assert run is not None and len(run.steps) == len(shorter.steps)
    page = step_pages.steps_page({"h200": found}, "h200")
    assert "commit def;" in page and "abc" not in page


def test_other_batches_and_networks_are_not_on_the_page() -> None:
    other = [replace(record, workload="resnet50_steps") for record in stamped(explained(), FIRST)]
    assert step_pages.latest([*stamped(explained(2), FIRST), *other]) is None
