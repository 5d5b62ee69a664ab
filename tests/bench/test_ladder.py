"""The climb: wrong results are never timed; gains refer to the right base."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade.device import packing
from escalade.device.timing import Subject, Timing
from escalade_bench import ladder, trial
from escalade_bench.ladder import climb
from escalade_bench.measure import figures
from escalade_bench.measure.ceilings import Ceilings
from escalade_bench.measure.records import Record
from escalade_bench.trial import Settings
from tests.bench.fake import Scale, ScaleProblem, rung

CPU = torch.device("cpu")
CARD = Ceilings("card", 132, 60 << 20, 227 << 10, 139 << 30, 4000.0, 3900.0, {"fp32": 50.0, "fp16": 700.0})


@pytest.fixture
def timed_arms(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of all timed subjects."""
    names: list[str] = []
    real = trial.time_interleaved

    def spy(given: list[Subject], *rest: object, **settings: object) -> dict[str, Timing]:
        names.extend(subject.name for subject in given)
        return real(given, *rest, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(trial, "time_interleaved", spy)
    return names


@pytest.mark.parametrize("fault", ["unwritten", "mutates", "wrong_element", "uses_workspace", "raises"])
def test_a_rung_that_is_wrong_is_a_failure_row_and_never_timed(fault: str, timed_arms: list[str]) -> None:
    operation = Scale(rung("right"), rung("suspect", fault, below="right"))
    records = {record.rung: record for record in climb(operation, ScaleProblem(100))}
    assert records["suspect"].failure and records["suspect"].median_us is None
    assert records["right"].median_us is not None and not records["right"].failure
    assert len(timed_arms) == 1 and timed_arms[0].startswith("right")


def test_on_the_twin_nothing_is_called_a_speed() -> None:
    operation = Scale(rung("one"), rung("two", below="one"))
    for record in climb(operation, ScaleProblem(100)):
        assert record.timing == "twin" and record.median_us is not None
        assert record.tflops is record.gbps is record.gain is record.peer_gain is None


def test_tuning_tries_every_config_and_keeps_one_record_a_rung(timed_arms: list[str]) -> None:
    records = climb(Scale(rung("one")), ScaleProblem(100), Settings(tune=True))
    assert len(records) == 1 and records[0].config["threads"] in (64, 32)
    assert len(timed_arms) == 2, "the finalists"


def test_a_climb_in_which_nothing_is_right_has_only_failures(timed_arms: list[str]) -> None:
    records = climb(Scale(rung("one", "raises")), ScaleProblem(100))
    assert [bool(record.failure) for record in records] == [True]
    assert not timed_arms


def record(
    rung: str, us: float, dtype: str = "fp32", layout: str = "nchw", system: str = "escalade"
) -> Record:
    return Record("scale", "p", dtype, layout, 1, system, rung, median_us=us, timing="graph")


LADDER = Scale(rung("one"), rung("two", below="one")).ladder


def gain_of_two(*others: Record) -> Record:
    return figures.with_gains([record("two", 10.0), *others], LADDER)[0]


def test_gain_over_the_rung_below_in_the_same_dtype_and_layout() -> None:
    found = gain_of_two(record("one", 30.0), record("one", 20.0, layout="nhwc"), record("one", 5.0, "fp16"))
    assert found.gain == 3.0 and found.gain_over == "one fp32 nchw"


def test_else_over_its_best_of_the_same_dtype() -> None:
    found = gain_of_two(record("one", 20.0, layout="nhwc"), record("one", 5.0, "fp16"))
    assert found.gain == 2.0 and found.gain_over == "one fp32 nhwc"


def test_else_over_its_best_of_any() -> None:
    found = gain_of_two(record("one", 5.0, "fp16"), record("one", 7.0, "bf16"))
    assert found.gain == 0.5 and found.gain_over == "one fp16 nchw"


def test_no_gain_over_what_was_not_measured_or_failed() -> None:
    failed = replace(record("one", 1.0), median_us=None, failure="wrong")
    assert gain_of_two().gain is None
    assert gain_of_two(failed).gain is None


def test_peer_gain_is_over_the_best_peer_of_the_same_dtype() -> None:
    found = gain_of_two(
        record("", 8.0, system="torch-nchw"),
        record("", 6.0, layout="nhwc", system="torch-nhwc"),
        record("", 1.0, "fp16", system="torch-nchw"),
    )
    assert found.peer_gain == 0.6 and found.peer == "torch-nhwc"


def test_figures_of_a_timing() -> None:
    problem = ScaleProblem(10**9)
    timing = Timing(4000.0, 3990.0, 4010.0, 20, "graph")
    found = figures.timed(record("one", 1.0), problem, timing, CARD)
    assert found.tflops == pytest.approx(0.25)
    assert found.gbps == pytest.approx(2000.0)
    assert found.peak_pct == pytest.approx(0.5)
    assert found.floor_us == pytest.approx(2000.0), "bytes bound it: 8 GB at 4 TB/s"


def test_an_idea_s_gain_is_how_many_times_faster_it_makes_its_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, without = rung("one"), rung("one-without-idea")
    monkeypatch.setattr(ladder, "ablations", lambda operation: {"one": {"idea": without}})
    times = {"one": 10.0, "one-without-idea": 25.0}

    def fake(given: list[Subject], *rest: Any, **settings: Any) -> dict[str, Timing]:
        return {
            subject.name: Timing(times[subject.name.split()[0]], 9.0, 26.0, 5, "graph") for subject in given
        }

    monkeypatch.setattr(trial, "time_interleaved", fake)
    found = {r.rung: r for r in ladder.ablate(Scale(whole), ScaleProblem(100))}
    assert found["one-without-idea"].gain == 2.5 and found["one-without-idea"].gain_over == "one"
    assert found["one"].gain is None and found["one"].workload == "scale_ablation"


@pytest.mark.gpu
def test_a_climb_on_the_gpu_has_peers_and_speeds() -> None:
    operation = Scale(rung("one"), rung("two", below="one"), rung("wrong", "wrong_element"))
    records = climb(
        operation, ScaleProblem(1 << 20), Settings(seconds_each=0.02, device=torch.device("cuda", 0))
    )
    by_name = {r.rung or r.system: r for r in records}
    assert by_name["two"].gain and by_name["two"].peer_gain and by_name["two"].registers
    assert by_name["wrong"].failure and by_name["torch-nchw"].median_us


@pytest.mark.gpu
def test_on_the_gpu_the_graph_that_is_timed_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    real = packing.Executable

    class Idle(real):  # type: ignore[valid-type, misc]
        def __init__(self, recipe: Any, device: Any, label: str = "", **flags: Any) -> None:
            self.idle = label.startswith("suspect")
            super().__init__(recipe, device, label, **flags)

        def bind(self, tensors: Any) -> Any:
            return (lambda: tensors["x"].neg()) if self.idle else super().bind(tensors)

    monkeypatch.setattr(packing, "Executable", Idle)
    operation = Scale(rung("one"), rung("suspect", below="one"))
    records = climb(
        operation, ScaleProblem(1 << 20), Settings(seconds_each=0.02, device=torch.device("cuda", 0))
    )
    by_name = {r.rung or r.system: r for r in records}
    assert by_name["one"].median_us and by_name["torch-nchw"].median_us
    assert (
        "the timed results are wrong" in by_name["suspect"].failure and by_name["suspect"].median_us is None
    )
