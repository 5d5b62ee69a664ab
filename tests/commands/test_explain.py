"""The command `explain`: plans of models by name, and of engines in files."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from torch import nn
from typer.testing import Result

from escalade.engine import compile
from escalade.engine.engine import Engine
from escalade.errors import UnsupportedError
from tests.commands.support import run


class Small(nn.Module):
    """A convolution, and a step without a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cumsum(torch.relu(self.conv(x)), 3)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return compile(Small(), torch.randn(2, 8, 4, 4), dtype="fp16", device="cpu")


def shown(*arguments: str, device: str = "cpu") -> Result:
    return run("explain", *arguments, "--device", device)


def test_it_explains_models_and_files(engine: Engine, tmp_path: pathlib.Path) -> None:
    written = tmp_path / "plan.json"
    result = shown("lenet", "--batch", "4", "--dtype", "fp32", "--json", str(written))
    assert result.exit_code == 0, result.output
    assert "few_channels" in result.output and "mlp" in result.output
    assert "PyTorch computes every step" in result.output and "Nothing falls back" not in result.output
    data = json.loads(written.read_text())
    assert data["batch"] == 4 and data["dtype"] == "fp32" and data["title"] == "lenet"
    assert data["device"] == "cpu"
    file = tmp_path / "small.engine"
    engine.save(file)
    result = shown(str(file), "--batch", "5")
    assert result.exit_code == 0 and "5×8×4×4" in result.output and "aten::cumsum" in result.output


def test_it_explains_the_twins_plan() -> None:
    result = shown("spectral_autoencoder", "--batch", "4", device="twin")
    assert result.exit_code == 0 and "5x64n-64bg" in result.output and "1 step" in result.output
    assert "Nothing falls back" in result.output and "mlp/" in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("lenet19",), "neither a model (resnet18"),
        (("lenet", "--dtype", "fp64"), "dtype 'fp64'"),
        (("lenet", "--time"), "--time measures on a GPU"),
        (("lenet", "--results", "."), "--results records times of a model"),
    ],
)
def test_it_refuses_unsupported_arguments(arguments: tuple[str, ...], sentence: str) -> None:
    result = shown(*arguments)
    assert isinstance(result.exception, UnsupportedError) and sentence in str(result.exception)


def test_a_file_keeps_its_dtype(engine: Engine, tmp_path: pathlib.Path) -> None:
    engine.save(tmp_path / "small.engine")
    result = shown(str(tmp_path / "small.engine"), "--dtype", "fp32")
    assert "was compiled for fp16" in str(result.exception)
