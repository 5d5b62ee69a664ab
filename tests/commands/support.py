"""Helpers for tests of commands: the command line in this process, and an operation to run it on."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner, Result

from escalade import cli


def run(*arguments: str, columns: int = 160) -> Result:
    return CliRunner(env={"COLUMNS": str(columns)}).invoke(cli.app, list(arguments))


def said_by(*arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one-sentence error of a failing command."""
    monkeypatch.setattr(sys, "argv", ["escalade", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr()
    assert end.value.code == 1 and "all right" not in said.out
    return said.err.strip()
