"""The command `tables`: it overwrites nothing if records are missing."""

from __future__ import annotations

import pathlib

import pytest

from tests.commands.support import said_by


def test_tables_of_nothing_are_not_written(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("as it is")
    for more in ((), ("--check",)):
        given = ("tables", "--results", str(tmp_path / "nowhere"), "--root", str(tmp_path), *more)
        assert "there are no records under" in said_by(*given, monkeypatch=monkeypatch, capsys=capsys)
    assert (tmp_path / "README.md").read_text() == "as it is" and not (tmp_path / "docs").exists()
