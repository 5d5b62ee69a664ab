"""The command `check`: its measurements, output and exit status."""

from __future__ import annotations

import json
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from escalade.commands import networks
from escalade.engine.comparison import ComparedStep, Comparison
from escalade.errors import UnsupportedError
from tests.commands.support import run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A fake GPU, and a network that takes `plan_us`."""
    found: dict[str, Any] = {"plan_us": 10.0}

    def network(name: str, batch: int, dtype: str | None, device: str, *, measured: bool) -> tuple[Any, ...]:
        found.update(name=name, batch=batch, dtype=dtype, device=device, measured=measured)
        step = ComparedStep(1, "conv", "layer1", "conv2d", "window", 2.0, 5.0, 0.0)
        comparison = Comparison("fp16", batch, (step,), found["plan_us"], 20.0)
        return SimpleNamespace(compare=lambda x: comparison), (torch.zeros(1),)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(networks, "network", network)
    return found


def test_it_compares_a_network_with_pytorch(asked: dict[str, Any], tmp_path: pathlib.Path) -> None:
    written = tmp_path / "check.json"
    result = run("check", "lenet", "--batch", "4", "--dtype", "bf16", "--measured", "--json", str(written))
    assert result.exit_code == 0, result.output
    assert "lenet: fp16, batch 4" in result.output and "2.00 times as fast" in result.output
    assert json.loads(written.read_text())["title"] == "lenet"
    del asked["plan_us"]
    assert asked == {"name": "lenet", "batch": 4, "dtype": "bf16", "device": "cuda", "measured": True}


def test_it_fails_where_pytorch_is_faster(asked: dict[str, Any]) -> None:
    asked["plan_us"] = 21.0
    assert run("check", "lenet").exit_code == 1


def test_it_refuses_unsupported_arguments(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = run("check", "lenet")
    assert isinstance(result.exception, UnsupportedError)
    assert "check times plans on a GPU, and PyTorch finds none" in str(result.exception)
