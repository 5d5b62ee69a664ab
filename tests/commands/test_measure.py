"""The command `measure` without a GPU: its list, its check, and its refusals."""

from __future__ import annotations

import pathlib
from dataclasses import replace

import pytest

from escalade_bench.measure import records as store
from escalade_bench.measure.records import Record
from tests.commands.support import run, said_by


def test_stale_figures_are_listed_and_fail(tmp_path: pathlib.Path) -> None:
    for given, code in (("--list", 0), ("--check", 1)):
        ran = run("measure", "ladder/relu", given, "--results", str(tmp_path))
        assert ran.exit_code == code, ran.output
        assert "ladder/relu/relu_802816/fp16" in ran.output
    assert "never measured" in ran.output and " units are current (0%)" in ran.output


def test_records_without_machine_code_are_marked_as_older(tmp_path: pathlib.Path) -> None:
    ours = Record(
        "relu", "relu_802816", "fp16", "flat", 1, "escalade", "naive", median_us=2.0, gpu="NVIDIA H200"
    )
    peer = replace(ours, system="torch-flat", rung="")
    store.file_away(tmp_path, [ours, peer])
    for _ in range(2):
        assert run("measure", "ladder/relu", "--mark", "--results", str(tmp_path)).exit_code == 0
        marks = [record.older for record in store.load(tmp_path / "h200/relu.jsonl")]
        assert marks == ["measured before machine code was recorded", ""]


def test_measuring_takes_a_gpu_and_a_time(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("measure", "ladder/relu", "--budget", "9m", "--results", str(tmp_path))
    assert "there is none" in said_by(*given, monkeypatch=monkeypatch, capsys=capsys)
    ran = run("measure", "ladder/relu", "--budget", "soon")
    assert ran.exit_code == 2 and "is not a duration" in ran.output
