"""The command `bench`: the parts that it measures."""

from __future__ import annotations

import pytest
import torch

from tests.commands.support import said_by


def test_a_bench_without_parts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("escalade.commands.bench.network_device", lambda name: torch.device("cuda", 0))
    given = ("bench", "resnet18", "--parts", "phases", "--no-phases")
    assert "no part is left to measure" in said_by(*given, monkeypatch=monkeypatch, capsys=capsys)
