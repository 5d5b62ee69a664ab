"""The command `bench`: the parts that it measures."""

from __future__ import annotations

import pathlib

import pytest
import torch
from torch import nn

from tests.commands.support import run, said_by


def test_a_bench_without_parts(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("escalade.commands.selection.network_device", lambda name: torch.device("cuda", 0))
    given = ("bench", "resnet18", "--parts", "phases", "--no-phases")
    assert "no part is left to measure" in said_by(*given, monkeypatch=monkeypatch, capsys=capsys)


def test_programs_are_measured_too(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batch sizes other than the example's; models with several inputs are refused."""
    images = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Flatten(), nn.Linear(144, 5)
    )
    torch.export.save(torch.export.export(model.eval(), (images,)), tmp_path / "small.pt2")
    result = run("bench", str(tmp_path / "small.pt2"), "-b", "1,3", "--seconds", "0.01", "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "PyTorch computes everything" in " ".join(result.output.split())
    assert "small, 8² images" in result.output and result.output.count("│ fp32") == 3

    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    torch.export.save(torch.export.export(Two(), (images, images)), tmp_path / "two.pt2")
    given = ("bench", str(tmp_path / "two.pt2"), "--device", "cpu")
    said = said_by(*given, monkeypatch=monkeypatch, capsys=capsys)
    assert "takes other inputs than one batch of numbers" in said
