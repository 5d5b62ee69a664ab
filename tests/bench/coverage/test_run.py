"""Many networks in one run: several results, failures, records, and an exhausted time budget."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from escalade_bench.campaign.units import Session
from escalade_bench.coverage import run
from escalade_bench.coverage.catalogue import Entry
from escalade_bench.coverage.run import Coverage, enliven, left_over
from escalade_bench.measure import records as store
from escalade_bench.measure.records import Record
from tests.bench.coverage.networks import Attention, ConvNeXtBlock, Segmented
from tests.commands.support import run as command

SIZE = 32


def coverage(**changed: object) -> Coverage:
    usual = {"batches": (2,), "dtypes": ("fp32",), "peers": {}, "size": SIZE}
    session = Session(torch.device("cpu"), seconds=0.0)
    return Coverage("coverage_own", session, **{**usual, **changed})  # type: ignore[arg-type]


def measured(entry: Entry, which: Coverage) -> list[Record]:
    return [record for found in which.measure(entry, lambda text: None) for record in found]


def test_every_result_of_a_network_is_judged_and_its_plan_described() -> None:
    (record,) = measured(Entry("segmented", Segmented), coverage())
    assert (record.workload, record.problem) == ("coverage_own", "segmented_32_b2")
    assert not record.failure and record.wall_us
    assert record.error is not None and record.tolerance is not None and 0 < record.error < record.tolerance
    assert record.config["launches"] > 0 and "pytorch" in record.config


def test_what_is_no_image_is_measured_on_what_it_says_it_takes_and_indices_are_judged() -> None:
    class Largest(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.argmax(-1)

    (record,) = measured(Entry("largest", Largest, item=(6, 40)), coverage(dtypes=("fp16",)))
    assert (record.problem, record.layout, record.failure) == ("largest_40_b2", "flat", "")
    assert record.error == 0


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("it was never finished\nby anybody")


def test_what_fails_is_a_sentence_for_every_case_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = coverage(batches=(1, 2), timed=False)
    found = measured(Entry("broken", Broken), both)
    assert [record.problem for record in found] == ["broken_32_b1", "broken_32_b2"]
    assert all("it was never finished" in record.failure for record in found)

    def fails(*given: object, **named: object) -> None:
        monkeypatch.undo()
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(run, "planned", fails)
    first, second = measured(Entry("linear", lambda: nn.Sequential(nn.Flatten(), nn.Linear(3072, 2))), both)
    assert first.failure == "OutOfMemoryError: no room"
    assert not second.failure and second.error is None and second.config["launches"]


def test_nothing_is_left_constant_that_would_hide_what_is_in_front_of_it() -> None:
    """A classifier that returns zeros, with a branch weighted by a millionth."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Attention().eval()
        nn.init.zeros_(model.head.weight)
        block = ConvNeXtBlock(8).eval()
        nn.init.constant_(block.scale, 1e-6)
        image, x = torch.randn(2, 3, SIZE, SIZE), torch.randn(2, 8, 8, 8)
        assert bool((model(image) == model.head.bias).all()) and torch.allclose(block(x), x, atol=1e-4)
        enliven(model, image)
        enliven(block, x)
        assert float(model(image).detach().std(0).min()) > 1e-3
        assert not torch.allclose(block(x), x, atol=1e-2)
        assert float(model.norm1.weight.detach().std()) > 0.1


def test_a_run_stops_in_time_and_says_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(run.time, "monotonic", lambda: now[0])
    known = [Entry(name, Segmented) for name in ("a", "b", "ab", "b.backbone")]
    took = {"a": 40.0, "b": 20.0, "ab": 15.0, "b.backbone": 1.0}

    def takes(which: Coverage, entry: Entry, say: object) -> Iterator[list[Record]]:
        now[0] += took[entry.name]
        yield []

    monkeypatch.setattr(Coverage, "measure", takes)
    for budget, names in (
        (None, "a b ab b.backbone"),
        (99.0, "a b"),
        (115.0, "a b ab b.backbone"),
        (0.0, "a"),
    ):
        found = coverage().each(known, budget, lambda text: None)
        assert [entry.name for entry, _ in found] == names.split(), budget
    left = re.compile(left_over(known[1:]))
    assert [entry.name for entry in known if left.search(entry.name)] == ["b", "ab", "b.backbone"]


def test_the_command_plans_without_a_gpu_and_files_every_network(tmp_path: pathlib.Path) -> None:
    given = (
        "coverage",
        "tests.bench.coverage.networks:squeezenet,regnet",
        "--no-time",
        "--size",
        "32",
        "-b",
        "1",
    )
    said = command(*given, "-t", "fp16", "--results", str(tmp_path))
    assert said.exit_code == 0, said.output
    assert "2 of 2 networks planned" in said.output and "nothing is run" in said.output
    (path,) = tmp_path.glob("*/*.jsonl")
    found = store.load(path)
    assert path.name == "coverage_tests.bench.coverage.networks.jsonl"
    assert [record.problem for record in found] == ["squeezenet_32_b1", "regnet_32_b1"]
    as_it_comes = command(*given, "-t", "fp16", "--layout", "nchw", "--results", str(tmp_path))
    assert "networks_nchw, fp16, batch 1" in as_it_comes.output
    assert {record.layout for path in tmp_path.glob("*/*_nchw.jsonl") for record in store.load(path)} == {
        "nchw"
    }
    late = command(*given, "-t", "fp16", "--budget", "0")
    assert "not measured: 2 of 2 networks" in late.output and "^squeezenet$|^regnet$" in late.output
    one = ("coverage", "tests.bench.coverage.networks:squeezenet", "--device", "cpu", "--seconds", "0.01")
    run = command(*one, "--size", "32", "-b", "1", "-t", "fp32")
    assert run.exit_code == 0 and "On the CPU PyTorch computes everything" in " ".join(run.output.split())
