"""The command `build`; and constructors and programs as networks of other commands."""

from __future__ import annotations

import pathlib

import pytest
import torch
from PIL import Image

from escalade.engine import compile, load
from escalade.engine.file import read
from escalade.errors import UnsupportedError
from tests.commands.factories import Colours, Tiny
from tests.commands.support import run, said_by

TINY = f"{Tiny.__module__}:{Tiny.__name__}"
COLOURS = f"{Colours.__module__}:{Colours.__name__}"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tiny, pathlib.Path]:
    """A network, and its exported program in a file, for one item."""
    torch.manual_seed(5)
    model = Tiny().eval()
    path = tmp_path_factory.mktemp("program") / "tiny.pt2"
    torch.export.save(torch.export.export(model, (torch.randn(1, 64),)), path)
    return model, path


def test_a_program_becomes_a_file_with_kernels(
    program: tuple[Tiny, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    model, path = program
    built = tmp_path / "net.escalade"
    result = run("build", str(path), "-o", str(built), "-b", "1,3", "--dtype", "fp16", "--arch", "sm_90a")
    assert result.exit_code == 0, result.output
    assert "plans for batch 1, 3 on sm_90a" in result.output
    _, dtype, carried = read(built, torch.device("cpu"))
    assert dtype == "fp16" and [plan.inputs[0][0] for plan in carried.plans] == [[1, 64], [3, 64]]
    assert list(carried.codes) == ["sm_90a"] and carried.codes["sm_90a"]
    x = torch.randn(5, 64)
    torch.testing.assert_close(load(built, device="cpu")(x), model(x), rtol=5e-3, atol=5e-3)
    assert "linear" in run("explain", str(built), "--device", "twin").output


def test_programs_are_compiled_as_they_are(program: tuple[Tiny, pathlib.Path]) -> None:
    model, path = program
    x = torch.randn(4, 64)
    exported = torch.export.load(path)
    before = {name: tensor.clone() for name, tensor in exported.state_dict.items()}
    for given in (exported, path):
        torch.testing.assert_close(compile(given)(x), model(x))
    torch.testing.assert_close(dict(exported.state_dict), before, rtol=0, atol=0)
    torch.testing.assert_close(exported.module()(x[:1]), model(x[:1]))


def test_an_invalid_program_is_reported(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "broken.pt2").write_bytes(b"nothing")
    with pytest.raises(UnsupportedError, match="was not written by torch.export.save"):
        compile(tmp_path / "broken.pt2")
    assert not caplog.records  # PyTorch would log a traceback
    with pytest.raises(UnsupportedError, match="there is no file"):
        compile(tmp_path / "absent.pt2")
    with pytest.raises(UnsupportedError, match=r"read saved engines with escalade.load"):
        compile("net.escalade")
    with pytest.raises(UnsupportedError, match="compile needs example inputs"):
        compile(Tiny())


def test_constructors_are_found_by_name() -> None:
    assert "linear" in run("explain", TINY, "--device", "cpu", "--batch", "2").output
    result = run("bench", TINY, "--device", "cpu", "--batch", "2", "--seconds", "0.01")
    assert result.exit_code == 0 and "Tiny" in result.output, result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("build", TINY, "-o", "/dev/null/net.escalade"), "/dev/null/net.escalade cannot be written"),
        (("build", TINY, "-o", "net.escalade", "--dtype", "fp8"), "fp8 needs calibration data"),
        (("build", "nosuch.thing:Net", "-o", "net.escalade"), "there is no module 'nosuch.thing'"),
        (
            ("explain", f"{Tiny.__module__}:Nosuch"),
            "has no network 'Nosuch' that takes no arguments; it has Tiny, Colours",
        ),
        (
            ("build", TINY, "-o", "net.escalade", "--arch", "sm_70"),
            "architecture 'sm_70': supported are sm_80",
        ),
    ],
)
def test_mistakes_are_sentences(
    arguments: tuple[str, ...],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: pathlib.Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert sentence in said_by(*arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert not list(tmp_path.iterdir())


def test_images_are_classified_by_any_network(tmp_path: pathlib.Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for number, colour in enumerate(("red", "white")):
        Image.new("RGB", (20, 16), colour).save(images / f"{number}.png")
    engine = compile(Colours(), torch.randn(1, *Colours.example_shape), normalize=((0.0,) * 3, (1.0,) * 3))
    engine.save(tmp_path / "colours.escalade")
    for network in (COLOURS, str(tmp_path / "colours.escalade")):
        written = tmp_path / "found.csv"
        result = run("classify", str(images), "-n", network, "--device", "cpu", "--csv", str(written))
        assert result.exit_code == 0, result.output
        assert "2 images in" in result.output and len(written.read_text().splitlines()) == 1 + 2 * 4


def test_a_network_without_image_input_is_reported(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("RGB", (20, 16)).save(tmp_path / "black.png")
    compile(Colours(), torch.randn(1, *Colours.example_shape)).save(tmp_path / "plain.escalade")
    for network, sentence in (
        (TINY, "the network takes inputs of [batch, 64]; images are [batch, 3, side, side]"),
        (str(tmp_path / "plain.escalade"), "was compiled without normalize=(mean, std)"),
    ):
        arguments = ("classify", str(tmp_path / "black.png"), "-n", network, "--device", "cpu")
        assert sentence in said_by(*arguments, monkeypatch=monkeypatch, capsys=capsys)
