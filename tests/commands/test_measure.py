"""The command `measure` where there is no GPU: what it lists and checks, and what it refuses."""

from __future__ import annotations

import pathlib

import pytest

from tests.commands.support import run, said_by


def test_what_is_stale_is_listed_and_fails(tmp_path: pathlib.Path) -> None:
    for given, code in (("--list", 0), ("--check", 1)):
        ran = run("measure", "ladder/relu", given, "--results", str(tmp_path))
        assert ran.exit_code == code, ran.output
        assert "ladder/relu/relu_802816/fp16" in ran.output and "never measured" in ran.output
    assert "units are missing or overtaken (ladder" in ran.output


def test_measuring_takes_a_gpu_and_a_time(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("measure", "ladder/relu", "--budget", "9m", "--results", str(tmp_path))
    assert "there is none" in said_by(*given, monkeypatch=monkeypatch, capsys=capsys)
    ran = run("measure", "ladder/relu", "--budget", "soon")
    assert ran.exit_code == 2 and "is no time" in ran.output
