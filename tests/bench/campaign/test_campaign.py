"""A campaign: what is missing or overtaken is measured, the most valuable first, and nothing twice."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from escalade import ops
from escalade.bench.campaign import evaluation, ladders, registry, runner, units
from escalade.bench.campaign.runner import Clock, ordered, run
from escalade.bench.campaign.staleness import WORKLOAD, State, states
from escalade.bench.campaign.units import Say, Session, Unit
from escalade.bench.coverage.catalogue import TORCHVISION
from escalade.bench.networks.workloads import WORKLOADS
from escalade.device import program
from escalade.errors import UnsupportedError
from escalade.measure import records as store
from escalade.measure.records import Provenance, Record
from escalade.measure.sources import hashes
from escalade.report import commits
from escalade.report.plans import autoencoder, rounds
from escalade.report.tables import PREFERRED_GPU
from tests.bench.fake import SOURCE, Scale, rung

VERSIONS = {"torch": "2.11", "cuda": "13.0", "cudnn": "9", "nvrtc": "13.0"}
ORIGIN = Provenance("NVIDIA H200", "580", VERSIONS, "abc", "2026-01-02T03:04:05+00:00", "escalade measure")


def unit(name: str, source: str = "", seconds: float = 1.0, value: float = 1.0, **more: object) -> Unit:
    """A unit of one comparison, ours and a peer's, made of a source."""

    def measure(session: Session, say: Say) -> Iterator[list[Record]]:
        ours = Record(
            "ladder", name, "fp32", "nchw", 1, "escalade", "right", sources=hashes([source] if source else [])
        )
        yield [ours, replace(ours, system="torch-nchw", rung="", sources={})]

    return Unit(name, "a test", f"escalade ladder {name}", seconds, value, measure, **more)  # type: ignore[arg-type]


class Campaign:
    """Units, and the folder where their records go."""

    def __init__(self, folder: pathlib.Path, *units: Unit) -> None:
        self.folder, self.units = folder, units
        self.said: list[str] = []

    def states(self, versions: dict[str, str] | None = None) -> list[State]:
        return states(self.units, store.load_folder(self.folder).get("h200", []), versions)

    def reasons(self, versions: dict[str, str] | None = None) -> list[str]:
        return [state.why for state in self.states(versions)]

    def run(self, budget: float | None = None) -> list[str]:
        """The names of what is left."""
        session = Session(torch.device("cpu"), seconds=0.0)

        def keep(records: object) -> None:
            store.file_away(self.folder, records)  # type: ignore[arg-type]

        left = run(ordered(self.states()), session, ORIGIN, Clock(budget), keep, self.said.append)
        return [state.unit.name for state in left]


def test_what_a_figure_is_made_of_decides_and_not_its_commit(tmp_path: pathlib.Path) -> None:
    kernel, other = tmp_path / "a.cu", tmp_path / "b.cu"
    kernel.write_text("int one; // so far")
    other.write_text("int two;")
    program.read.cache_clear()
    one, two = unit("one", str(kernel)), unit("two", str(other))
    campaign = Campaign(tmp_path / "results", one, two)
    assert campaign.reasons() == ["never measured"] * 2
    assert campaign.run() == [] and campaign.reasons() == ["", ""]
    found = store.load(tmp_path / "results/h200/ladder.jsonl")
    assert [(r.command, bool(r.sources)) for r in found[:2]] == [
        ("escalade ladder one", True),
        ("escalade ladder one", False),
    ]
    kernel.write_text("/* A comment\n is no code */\n\n  int one;\n")
    program.read.cache_clear()
    assert campaign.reasons() == ["", ""]
    kernel.write_text('int one = "// no comment";')
    program.read.cache_clear()
    assert campaign.reasons() == [f"changed since: {kernel}", ""]
    kernel.write_text("int three;")
    program.read.cache_clear()
    assert campaign.reasons() == [f"changed since: {kernel}", ""]
    campaign.run()
    assert campaign.reasons() == ["", ""] and "0 units left" in campaign.said[-1]
    kernel.unlink()
    program.read.cache_clear()
    assert "changed since" in campaign.reasons()[0]
    campaign.units = (one, replace(two, declared=("a new rung",)))
    assert "rungs, peers" in campaign.reasons()[1]
    campaign.units = (one, two)
    assert campaign.reasons(VERSIONS | {"torch": "2.12"})[1] == "measured with torch 2.11, not 2.12"
    assert campaign.reasons(VERSIONS)[1] == ""
    store.file_away(tmp_path / "results", [replace(found[2], commit="later")])
    assert campaign.reasons()[1] == "another run took the place of ladder two fp32"


def test_what_a_second_buys_decides_what_is_measured_within_a_budget(tmp_path: pathlib.Path) -> None:
    some = (
        unit("cheap", seconds=1, value=1),
        unit("dear", seconds=100, value=1000),
        unit("rich", seconds=2, value=10),
    )
    campaign = Campaign(tmp_path, *some)
    assert [state.unit.name for state in ordered(campaign.states())] == ["dear", "rich", "cheap"]
    assert campaign.run(budget=50) == ["dear"]
    assert [line.partition(":")[0] for line in campaign.said if " units left" in line] == ["rich", "cheap"]
    assert campaign.run(budget=50) == ["dear"] and campaign.run() == []


def test_units_that_never_ran_are_expected_to_take_as_long_as_others_of_their_kind(
    tmp_path: pathlib.Path,
) -> None:
    some = [unit(f"ladder/{name}", seconds=seconds) for name, seconds in (("a", 10), ("b", 20), ("new", 30))]
    log = [
        Record(
            WORKLOAD, f"ladder/{name}", "", "", 0, "escalade", "", config={"seconds": took, "comparisons": []}
        )
        for name, took in (("a", 25.0), ("b", 70.0))
    ]
    assert [state.seconds for state in states([*some, unit("network/x", seconds=5)], log)] == [25, 70, 90, 5]
    quick = [replace(record, config=record.config | {"seconds": 1.0}) for record in log]
    assert states(some, quick)[2].seconds == 30, "that others were quicker is no promise"


def test_a_campaign_that_is_stopped_goes_on_where_it_was(tmp_path: pathlib.Path) -> None:
    stopped = True

    def measure(session: Session, say: Say) -> Iterator[list[Record]]:
        yield [Record("ladder", "first", "fp32", "", 1, "escalade", "right")]
        if stopped:
            raise KeyboardInterrupt
        yield [Record("ladder", "second", "fp32", "", 1, "escalade", "right")]

    long = replace(unit("long"), measure=measure)
    campaign = Campaign(tmp_path, unit("short", value=2), long)
    with pytest.raises(KeyboardInterrupt):
        campaign.run()
    assert campaign.reasons() == ["", "begun, and not measured to its end"]
    later = Campaign(tmp_path, long, unit("cheap", value=0.1))
    assert [state.unit.name for state in ordered(later.states())] == ["cheap", "long"]
    assert len(store.load(tmp_path / "h200/ladder.jsonl")) == 3
    stopped = False
    assert campaign.run() == [] and campaign.reasons() == ["", ""]


def test_a_unit_that_fails_is_told_and_not_tried_again(tmp_path: pathlib.Path) -> None:
    def broken(session: Session, say: Say) -> Iterator[list[Record]]:
        raise RuntimeError("no memory")
        yield []

    campaign = Campaign(tmp_path, replace(unit("broken", value=2), measure=broken), unit("sound"))
    assert campaign.run() == [] and campaign.reasons() == ["", ""]
    assert [state.failure for state in campaign.states()] == ["no memory", ""]
    assert "broken: no memory" in campaign.said


def test_compilers_work_ahead_and_rest_while_the_wall_clock_is_read(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU that is not there: what is compiled, and when."""
    events: list[str] = []
    there = threading.Event()

    def precompile(wanted: list[str], architecture: str, workers: int, done: Callable[[str], None]) -> None:
        there.wait()  # until ceilings are measured
        for name in wanted:
            events.append(f"{name} compiled for {architecture}")
            done(name)
        raise RuntimeError("a pool that breaks keeps nobody waiting")

    def measured(name: str, **more: object) -> Unit:
        def measure(session: Session, say: Say) -> Iterator[list[Record]]:
            events.append(f"{name} measured")
            yield []

        return replace(unit(name, **more), measure=measure, programs=lambda device: [name])  # type: ignore

    monkeypatch.setattr(runner, "precompile", precompile)
    monkeypatch.setattr(runner.cuda, "architecture", lambda index: "sm_90a")
    monkeypatch.setattr(units.card, "measure", lambda device: there.set())
    chosen = [measured("a", value=3), measured("b", value=2, by_clock=True), measured("c", seconds=1000)]
    session = Session(torch.device("cuda", 0))
    left = run(ordered(states(chosen, [])), session, ORIGIN, Clock(500), lambda records: None, events.append)
    assert [state.unit.name for state in left] == ["c"]
    assert events.index("a compiled for sm_90a") < events.index("a measured")
    assert events.index("b compiled for sm_90a") < events.index("b measured")
    assert "c compiled for sm_90a" not in events, "there is no time for it"


def test_a_ladder_runs_as_units(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = Scale(rung("right"), rung("wrong", "wrong_element", below="right"))
    monkeypatch.setattr("escalade.ops.OPERATIONS", {"scale": operation})
    (ladder, *_) = ladders.units()
    campaign = Campaign(tmp_path, ladder)
    campaign.run()
    (found,) = [r for r in store.load(tmp_path / "h200/scale.jsonl") if r.rung == "right"]
    assert found.sources == hashes([SOURCE])
    assert campaign.reasons() == [""]


@pytest.fixture(scope="module")
def every() -> dict[str, Unit]:
    """All units there are; some take a while to list."""
    return registry.units()


def test_the_registry_has_every_kind_and_finds_names(every: dict[str, Unit]) -> None:
    assert {idea.measured_by for idea in autoencoder.IDEAS} <= every.keys(), "what measures a plan"
    assert registry.named([autoencoder.POOL[2]])
    assert {
        f"ladder/mlp/{name}/{dtype}" for name in rounds.PROBLEMS for dtype in rounds.DTYPES
    } <= every.keys()
    assert {one.kind for one in every.values()} >= {
        "ladder",
        "ablation",
        "crossover",
        "network",
        "layers",
    }
    assert all(name == one.name and one.seconds > 0 and one.value > 0 for name, one in every.items())
    assert all(
        one.command.startswith("escalade ") and "--results" not in one.command for one in every.values()
    )
    assert WORKLOAD not in {one.kind for one in every.values()}
    for pattern in ("ladder/relu", "network/*/fp16", "layers/input_gradient/"):
        assert registry.named([pattern])
    with pytest.raises(UnsupportedError, match="no unit 'ladders'; names begin with ladder,"):
        registry.named(["ladders"])


def test_right_answers_are_a_unit_where_weights_and_photographs_are(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESCALADE_DATA", str(tmp_path))
    assert not list(evaluation.units()) and evaluation.WEIGHTS in evaluation.missing()
    for name in (evaluation.WEIGHTS, evaluation.PHOTOGRAPHS, evaluation.CLASSES):
        (tmp_path / name).touch()
    (found,) = evaluation.units()
    assert found.kind in registry.KINDS and not evaluation.missing()
    assert found.command.startswith(
        f"escalade evaluate resnet18 --weights {tmp_path / evaluation.WEIGHTS} --data"
    )


def test_whatever_is_filed_has_units_that_measure_it_again(every: dict[str, Unit]) -> None:
    """What README and docs show comes of records, so no workload among them may be unknown to the campaign."""
    apart = {*commits.APART, "autoencoder_learning"}  # a run of `escalade train`, and what is no comparison
    parts = {
        f"{name}_{part}".replace("-", "_"): f"network/{name}/{part}"
        for name in WORKLOADS
        for part in WORKLOADS[name].parts
    }
    records = store.load_folder(pathlib.Path("results"))[PREFERRED_GPU]
    for workload in {record.workload for record in records} - apart:
        name, _, rest = workload.partition("_")
        begins = parts.get(workload) or (
            f"ladder/{workload}/" if workload in ops.OPERATIONS
            else f"network/{workload}/batches/" if workload in WORKLOADS
            else f"layers/{rest or 'forward'}/" if name == "layers"
            else "calls/" if name == "calls"
            else f"coverage/{rest}/" if name == "coverage"
            else f"{rest}/{name}"
        )  # fmt: skip
        if begins.startswith((f"coverage/{TORCHVISION}/", "evaluation/")):
            continue  # there are such units only where networks, or weights and photographs, are at hand
        assert any(each.startswith(begins) for each in every), workload


def test_units_are_small_enough_for_a_short_budget(every: dict[str, Unit]) -> None:
    """A minute and a half must bring every kind of figure forward, but for those that need torch.compile's search."""
    for one in every.values():
        assert one.seconds <= 90 or "torch-compile," in one.command or "training-ablation" in one.command, (
            one.name
        )
