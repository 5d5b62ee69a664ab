"""The command `precompile`: the kernels it compiles."""

from __future__ import annotations

import pathlib

import pytest

from tests.bench.fake import Scale
from tests.commands.support import run


def test_precompile_compiles_and_reports_the_count(
    with_operation: Scale, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ESCALADE_CACHE_DIR", str(tmp_path))
    result = run("precompile", "scale", "--arch", "sm_90a", "--workers", "1")
    assert result.exit_code == 0 and "2 of 2 kernels compiled for sm_90a" in result.output
