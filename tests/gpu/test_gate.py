"""Tests of `make gpu-test`: what it runs, and when it fails. Needs no GPU: the sanitizer is fake."""

from __future__ import annotations

import pathlib
import stat
from dataclasses import replace
from typing import Any

import pytest
import torch

from escalade.ops import OPERATIONS
from escalade_bench.measure import records as store
from escalade_bench.report.document import markdown
from escalade_bench.report.pages import records as pages
from tests.gpu import gate, sanitize
from tests.gpu.gate import Part
from tests.support import all_rungs

CPU = torch.device("cpu")
EASY = [
    sanitize.Job("softmax", "naive", "1_b4", "fp32", "flat"),
    sanitize.Job("relu", "naive", "relu_1", "fp32", "flat"),
    sanitize.Job("relu", "vectorised", "relu_1", "fp32", "flat"),
]
MEMCHECK = """========= COMPUTE-SANITIZER
begins softmax naive 1_b4 fp32 flat
right softmax naive 1_b4 fp32 flat
========= ERROR SUMMARY: 0 errors
"""
INVALID = """========= COMPUTE-SANITIZER
begins softmax naive 1_b4 fp32 flat
========= Invalid __global__ read of size 4 bytes
=========     at softmax_naive+0x80
=========     by thread (1,0,0) in block (0,0,0)
=========
wrong softmax naive 1_b4 fp32 flat: LaunchError: illegal
========= ERROR SUMMARY: 1 error
"""
HAZARD = """========= COMPUTE-SANITIZER
begins relu naive relu_1 fp32 flat
========= Error: Race reported between Write access at a+0x10 and Read access at a+0x20 [8 hazards]
right relu naive relu_1 fp32 flat
========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)
"""


def test_every_source_and_every_rung_is_looked_at() -> None:
    jobs = sanitize.covering()
    assert set().union(*(job.sources for job in jobs)) == sanitize.sources()
    of_rungs = [job for job in jobs if isinstance(job, sanitize.Job)]
    assert {(job.operation, job.rung) for job in of_rungs} == {(o.name, rung.name) for o, rung in all_rungs()}
    assert len(set(jobs)) == len(jobs) <= len(all_rungs()) + 10
    assert all(sanitize.parse(str(job)) == job for job in jobs)
    assert all(job.parts[1].supports(job.parts[2]) is None for job in of_rungs)


def test_jobs_report_whether_results_are_right(capsys: pytest.CaptureFixture[str]) -> None:
    assert sanitize.main([f"{EASY[0]}\n", "\n"], CPU) == 0
    assert capsys.readouterr().out == f"begins {EASY[0]}\nright {EASY[0]}\n"
    assert sanitize.main(["softmax naive nonsense fp32 flat"], CPU) == 1
    assert "wrong softmax naive nonsense fp32 flat: UnsupportedError" in capsys.readouterr().out


def test_raw_memory_is_not_poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under initcheck, memory must not be filled with a pattern before its first write."""
    patterns: list[str] = []

    def fill(tensor: torch.Tensor, value: float) -> torch.Tensor:
        patterns.append("output")
        return tensor

    def poison(recipe: Any, device: torch.device) -> dict[str, torch.Tensor]:
        patterns.append("workspaces")
        return {}

    monkeypatch.setattr(torch.Tensor, "fill_", fill)
    monkeypatch.setattr(sanitize, "poisoned_workspaces", poison)
    for raw, expected in ((False, ["workspaces", "output"]), (True, ["workspaces"])):
        patterns.clear()
        assert sanitize.run(EASY[0], CPU, raw=raw) == "" and patterns == expected


def test_a_wrong_result_is_no_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    operation = OPERATIONS["softmax"]
    monkeypatch.setattr(type(operation), "reference", lambda *_: torch.full((4, 1), 2.0, dtype=torch.float64))
    assert "of y: " in sanitize.run(EASY[0], CPU)


@pytest.mark.parametrize(
    ("text", "findings", "right", "said"),
    [
        (MEMCHECK, [], 1, True),
        (INVALID, ["Invalid __global__ read", "LaunchError"], 0, True),
        (HAZARD, ["relu naive relu_1 fp32 flat: Error: Race"], 1, True),
        (MEMCHECK.replace("0 errors", "3 errors"), ["ERROR SUMMARY: 3 errors"], 1, True),
        (MEMCHECK.replace("=========", "#"), [], 1, False),
        ("", [], 0, False),
    ],
)
def test_output_of_a_sanitizer(text: str, findings: list[str], right: int, said: bool) -> None:
    found = gate.read(text)
    assert found[1:] == (right, said) and len(found[0]) == len(findings)
    assert all(part in whole for part, whole in zip(findings, found[0], strict=True))


def fake(tmp_path: pathlib.Path, body: str) -> str:
    """A sanitizer that runs the program on the twin, or runs `body` instead."""
    script = tmp_path / "compute-sanitizer"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && {{ echo Version 9.9; exit 0; }}\n{body}\n')
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return str(script)


RUN = 'while [ "$1" != -m ]; do program="$1"; shift; done; "$program" "$@" --twin; code=$?'
PRETEND = "sed 's/^/right /'; code=0"
SUM_UP = 'echo "========= ERROR SUMMARY: 0 errors"; exit $code'


def test_a_tool_that_finds_nothing(tmp_path: pathlib.Path) -> None:
    part = gate.run_tool("memcheck", fake(tmp_path, f"{RUN}; {SUM_UP}"), EASY, 1)
    assert part.failure == "" and part.system == "compute-sanitizer 9.9"
    assert (part.counts["passed"], part.counts["failed"]) == (3, 0)


def test_jobs_are_spread_over_processes(tmp_path: pathlib.Path) -> None:
    part = gate.run_tool("racecheck", fake(tmp_path, f"{PRETEND}; {SUM_UP}"), EASY, 2)
    assert part.failure == "" and part.counts["passed"] == 3


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            f'echo "========= Invalid __shared__ write of size 4 bytes"; {PRETEND}; {SUM_UP}',
            "Invalid __shared__",
        ),
        ("exit 0", "no summary"),
        ("cat >/dev/null; exit 86", "it ended with 86"),
        ('cat >/dev/null; echo "========= ERROR SUMMARY: 0 errors"', "jobs did not end with a right result"),
        ("sleep 60", "longer than"),
    ],
)
def test_a_tool_that_does_not_report_success(
    body: str, sentence: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "TOOL_SECONDS", 1 if "sleep" in body else 100)
    part = gate.run_tool("memcheck", fake(tmp_path, body), EASY[:1], 1)
    assert sentence in part.failure


REPORT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_a" name="one"/>
<testcase classname="tests.gpu.test_a" name="two"><failure message="no"/></testcase>
<testcase classname="tests.gpu.test_a" name="three"><error/></testcase>
<testcase classname="tests.gpu.test_a" name="four"><skipped message="needs two"/></testcase>
</testsuite></testsuites>"""


def test_counts_are_those_of_the_report() -> None:
    assert gate.counted(REPORT) == {
        "passed": 1, "failed": 2, "skipped": 1, "wrong": ["test_a::two: no", "test_a::three"],
        "reasons": {"needs two": 1},
    }  # fmt: skip


ORIGIN = store.Provenance("NVIDIA H200", "580.1", {"torch": "2.11"}, "abc", "2026-01-02T03:04:05+00:00", "")
SUITE = Part("tests", "pytest", gate.counted(REPORT), 200.0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that there is one."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(store, "provenance", lambda device, command: replace(ORIGIN, command=command))
    monkeypatch.setattr(gate, "run_suite", lambda workers, seed: SUITE)
    monkeypatch.setattr(sanitize, "covering", lambda: EASY)


@pytest.mark.usefixtures("gpu")
def test_without_a_sanitizer_it_fails_and_reports_it(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "find_sanitizer", lambda: None)
    assert gate.main(["--results", str(tmp_path)]) == 1
    found = store.load(tmp_path / "h200" / "gpu_test.jsonl")
    assert [record.problem for record in found] == ["tests", *gate.TOOLS]
    assert "not on the PATH" in found[1].failure and found[0].commit == ORIGIN.commit


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("broken", ["", "tests", "racecheck"])
def test_it_fails_if_any_part_does(
    broken: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "find_sanitizer", lambda: "compute-sanitizer")

    def part(name: str) -> Part:
        return Part(name, "x", {"passed": 3}, 1.0, "found" if name == broken else "")

    monkeypatch.setattr(gate, "run_suite", lambda workers, seed: part("tests"))
    monkeypatch.setattr(gate, "run_tool", lambda tool, *_: part(tool))
    assert gate.main(["--results", str(tmp_path)]) == bool(broken)
    text = markdown(pages.gpu_tests(store.load(tmp_path / "h200" / "gpu_test.jsonl")))
    assert text.count("| right |") == len(gate.TOOLS) + (not broken) and ("failed: found" in text) == bool(
        broken
    )


def test_without_a_gpu_it_fails_and_reports_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gate.main([]) == 2
    assert "PyTorch finds none" in capsys.readouterr().out


def test_the_page_shows_the_last_run() -> None:
    stamped = [
        store.Record(
            pages.GPU_TEST, "tests", "", "", 0, "pytest", "", config={**SUITE.counts, "seconds": 200}
        ).stamped(ORIGIN)
    ]
    text = markdown(pages.gpu_tests(stamped))
    assert "| tests | pytest | 1 | 2 | 1 | 200 | right | abc 01-02 |" in text and "- needs two: 1" in text
