"""The command `layers`: what it measures for the given names."""

from __future__ import annotations

import re

import pytest

from tests.commands.support import run, said_by


def test_layers_that_a_direction_leaves_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An image has no gradient, and layers that no rung supports are not measured."""
    image = ("layers", "3to8_9_k3s1_b1", "--direction", "input_gradient", "--device", "twin")
    assert "nothing to measure" in said_by(*image, monkeypatch=monkeypatch, capsys=capsys)
    monkeypatch.setattr("escalade.commands.layer_runs.measure", lambda *_: [])
    other = ("layers", "8to8_9_k3s1_b1", "--device", "twin")
    assert "nothing was measured" in said_by(*other, monkeypatch=monkeypatch, capsys=capsys)


def test_long_measurements_are_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("escalade.commands.layer_runs.measure", lambda *_: [])
    told = run("layers", "resnet50", "--device", "twin", columns=200).output
    assert re.search(
        r"^\d+ layers to measure: about [\d.]+ h\. Take less with .*--batch 1$", told, re.MULTILINE
    ), told
    small = run("layers", "8to8_9_k3s1_b1", "--device", "twin", columns=200).output
    assert "to measure: about" not in small
