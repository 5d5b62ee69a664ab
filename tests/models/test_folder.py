"""Folders in Hugging Face's layout, and timm networks by name, in place of a model."""

from __future__ import annotations

import json
import pathlib
import sys
import types
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from escalade.engine import compile
from escalade.errors import UnsupportedError
from escalade_bench.coverage.catalogue import _define_operators
from tests.commands.support import run, said_by


class Net(nn.Module):
    """A network with options."""

    def __init__(self, num_classes: int = 7, width: int = 4) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, width, 3), nn.Linear(width, num_classes)
        self.default_cfg = {"input_size": (3, 20, 20)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.conv(x).mean((2, 3)))


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A library with timm's interface and one network."""

    def create_model(name: str, pretrained: bool = False, **options: Any) -> nn.Module:
        if name.partition(".")[0] != "net":
            raise RuntimeError(f"Unknown model ({name})")
        assert not pretrained
        return Net(**options)

    made: Any = types.ModuleType("timm")
    made.__version__, made.create_model = "0", create_model
    made.list_models = lambda: ["net", *(f"other{number}" for number in range(200))]
    made.is_model = lambda name: name.partition(".")[0] == "net"
    made.get_pretrained_cfg = lambda name: types.SimpleNamespace(input_size=(3, 24, 24))
    monkeypatch.setitem(sys.modules, "timm", made)
    return made


def _folder(path: pathlib.Path, config: dict[str, Any], model: nn.Module | None = None) -> pathlib.Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if model is not None:
        save_file(model.state_dict(), path / "model.safetensors")
    return path


def test_a_folder_of_timm_is_compiled_with_its_weights(
    tmp_path: pathlib.Path, timm: types.ModuleType
) -> None:
    torch.manual_seed(3)
    model = Net(5, width=6)
    config = {
        "architecture": "net",
        "num_classes": 5,
        "model_args": {"width": 6},
        "pretrained_cfg": {"input_size": [3, 16, 12]},
    }
    folder = _folder(tmp_path / "net", config, model)
    x = torch.randn(2, 3, 16, 12)
    for given in (folder, str(folder)):
        engine = compile(given)
        torch.testing.assert_close(engine(x), model(x).detach(), rtol=1e-4, atol=1e-5)
    assert "16×12" in run("explain", str(folder), "--device", "cpu").output
    result = run("bench", str(folder), "-b", "2", "--seconds", "0.01", "--device", "cpu")
    assert result.exit_code == 0 and "net" in result.output, result.output
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    torch.testing.assert_close(compile(folder)(x), model(x).detach(), rtol=1e-4, atol=1e-5)


def test_networks_of_timm_are_found_by_name(
    tmp_path: pathlib.Path,
    timm: types.ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("escalade_bench.coverage.catalogue._define_operators", lambda: None)
    for name in ("timm:net", "timm:net.tag_in1k"):
        result = run("explain", name, "--device", "cpu")
        assert result.exit_code == 0 and "24×24" in result.output, result.output
    said = said_by("explain", "timm:nett", monkeypatch=monkeypatch, capsys=capsys)
    assert (
        "timm has no network nett" in said.replace("'", "") and "it has 201, with similar names: net" in said
    )

    model = Net()
    save_file(model.state_dict(), tmp_path / "own.safetensors")
    built = tmp_path / "net.escalade"
    result = run(
        "build",
        "timm:net",
        "-o",
        str(built),
        "--dtype",
        "fp32",
        "--weights",
        str(tmp_path / "own.safetensors"),
    )
    assert result.exit_code == 0, result.output
    from escalade import load

    x = torch.randn(1, 3, 24, 24)
    torch.testing.assert_close(load(built, device="cpu")(x), model(x).detach(), rtol=1e-4, atol=1e-5)
    save_file(Net(3).state_dict(), tmp_path / "other.safetensors")
    given = ("build", "timm:net", "-o", str(built), "--weights", str(tmp_path / "other.safetensors"))
    said = said_by(*given, monkeypatch=monkeypatch, capsys=capsys)
    assert "does not fit the network: it has other shapes for head.weight [3, 4] instead of [7, 4]" in said
    given = ("build", str(built), "-o", str(built), "--weights", str(tmp_path / "own.safetensors"))
    assert "has its own weights" in said_by(*given, monkeypatch=monkeypatch, capsys=capsys)


def test_errors_in_a_folder_are_reported(
    tmp_path: pathlib.Path, timm: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"architecture": "net", "num_classes": 7}
    cases: list[tuple[dict[str, Any], nn.Module | None, str]] = [
        ({}, None, "names no network: timm's has the key architecture"),
        ({"architecture": "strange"}, None, r"timm 0 cannot make 'strange' .*Unknown model"),
        (config, None, "has no weights: expected model.safetensors or pytorch_model.bin"),
        (config, Net(3), "it has other shapes for head.weight"),
        (
            config,
            nn.Conv2d(3, 4, 3),
            r"it lacks conv.weight, conv.bias, head.weight and 1 more; it has in addition",
        ),
    ]
    for number, (given, model, sentence) in enumerate(cases):
        with pytest.raises(UnsupportedError, match=sentence):
            compile(_folder(tmp_path / str(number), given, model))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UnsupportedError, match=r"is a folder without config.json"):
        compile(empty)
    (empty / "config.json").write_text("{")
    with pytest.raises(UnsupportedError, match=r"config.json cannot be read"):
        compile(empty)
    for library, given in (
        ("timm", config),
        ("transformers", {"architectures": ["ResNetForImageClassification"]}),
    ):
        monkeypatch.setitem(sys.modules, library, None)
        with pytest.raises(UnsupportedError, match=f"holds a network of {library}.*pip install {library}"):
            compile(_folder(tmp_path / library, given))


def test_a_folder_of_transformers_is_compiled_with_its_weights(tmp_path: pathlib.Path) -> None:
    _define_operators()  # transformers imports torchvision if installed
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=5, image_size=40
    )
    model = transformers.ResNetForImageClassification(config).eval()
    model.save_pretrained(tmp_path)
    engine, x = compile(tmp_path), torch.randn(2, 3, 40, 40)
    torch.testing.assert_close(engine(x).logits, model(x).logits.detach(), rtol=1e-4, atol=1e-5)
