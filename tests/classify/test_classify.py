"""Whole runs: plain PyTorch's classes, output files, and how runs end."""

from __future__ import annotations

import csv
import io
import json
import os
import pathlib
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from typer.testing import CliRunner, Result

from escalade import cli, models
from escalade.commands.classifiers import ClassifierRequest
from escalade.commands.classify import _show
from escalade.engine import compile
from escalade.models.resnet import BasicBlock
from escalade_apps.classify import predict
from escalade_apps.classify.images import Crop, Unreadable, decode
from escalade_apps.classify.prediction import Guess, Prediction, example, top_classes
from escalade_apps.classify.preparation import crop_of, crop_to, normalization, normalization_at

ROOT = pathlib.Path(__file__).parent.parent.parent
DATA = pathlib.Path(os.environ.get("ESCALADE_DATA", ROOT.parent / "shared" / "data"))
NORMALIZE = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SMALL = Crop(32, 32)
UNIT = ((0.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["classify", *map(str, arguments)])


@pytest.fixture(scope="module")
def network() -> models.ResNet:
    """Random weights, with logits far enough apart that rounding changes no order."""
    torch.manual_seed(0)
    model = models.ResNet(BasicBlock, (1, 1, 1, 1), 7, small_images=True).eval()
    with torch.no_grad():
        model.fc.weight.mul_(20)
    return model


@pytest.fixture(scope="module")
def weights(network: models.ResNet, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Saved as by training scripts for CIFAR."""
    renamed = {
        "module." + name.replace("downsample", "shortcut").replace("fc.", "linear."): value
        for name, value in network.state_dict().items()
    }
    path = tmp_path_factory.mktemp("weights") / "cifar.pth"
    torch.save({"net": renamed, "acc": 94.2, "epoch": 3}, path)
    return path


@pytest.fixture
def images(tmp_path: pathlib.Path) -> pathlib.Path:
    folder = tmp_path / "images [of things]"
    folder.mkdir()
    for number in range(5):
        pixels = np.random.default_rng(number).integers(0, 256, (40, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
    return folder


def expected(
    model: models.ResNet, files: list[pathlib.Path], crop: Crop, normalize: Any = None
) -> torch.Tensor:
    """Classes by plain PyTorch, in fp32."""
    x = torch.from_numpy(np.stack([decode(file, crop) for file in files])).permute(0, 3, 1, 2).float() / 255
    usual = UNIT if model.small_images else NORMALIZE
    mean, std = (torch.tensor(values)[:, None, None] for values in normalize or usual)
    x = (x - mean) / std
    with torch.no_grad():
        return model(x).softmax(1)


@pytest.mark.parametrize(
    ("names", "said"),
    [(["a.png"], "no such file: "), (["a.png", "b.png"], "a.png (and 1 more)")],
)
def test_images_that_are_not_there_are_missed_before_anything_is_compiled(
    names: list[str], said: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("escalade.commands.classifiers.build_classifier", None)  # not requested
    result = run(*(tmp_path / name for name in names), "-w", tmp_path / "no weights.pth", "--device", "cpu")
    assert result.exit_code and said in str(result.exception)


def test_a_folder_with_damaged_images(
    network: models.ResNet, weights: pathlib.Path, images: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    files = sorted(images.glob("*.png"))
    (images / "3a.png").write_text("not an image")
    labels = tmp_path / "labels.txt"
    labels.write_text("\n".join(f"[kind] {number}" for number in range(7)))
    result = run(
        images, tmp_path / "gone.png", "-w", weights, "--labels", labels, "--dtype", "fp32", "--batch", 2,
        "--top", 3, "--device", "cpu", "--json", tmp_path / "o.json", "--csv", tmp_path / "o.csv",
    )  # fmt: skip
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 1, "two images cannot be read"
    written = json.loads((tmp_path / "o.json").read_text())
    assert [entry["file"] for entry in written["images"]] == [str(file) for file in files]
    assert {pathlib.Path(entry["file"]).name for entry in written["unreadable"]} == {"3a.png", "gone.png"}
    assert written["network"] == "ResNet-10" and written["dtype"] == "fp32"
    assert written["decoder"].startswith("Pillow ") and written["decoder"] in result.output
    chances = expected(network, files, SMALL).topk(3)
    for number, entry in enumerate(written["images"]):
        assert [guess["class"] for guess in entry["top"]] == chances.indices[number].tolist()
        assert [guess["probability"] for guess in entry["top"]] == pytest.approx(
            chances.values[number].tolist(), rel=1e-3
        )
        assert all(guess["label"] == f"[kind] {guess['class']}" for guess in entry["top"])
    with open(tmp_path / "o.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 15 and rows[3]["file"] == str(files[1]) and rows[3]["rank"] == "1"
    assert "5 images in" in result.output and f"[kind] {int(chances.indices[0, 0])}" in result.output
    assert "2 of 7 images could not be read" in result.stderr and "no such file" in result.stderr
    assert not list(tmp_path.glob(".writing-*"))


ODD_NAMES = (
    b"\x1b[31mred\x1b[0m.png", b"bell\a.png", b"two\nlines, \"quoted\".png", b"carriage\rreturn.png",
    "turned\u202eround.png".encode(), b"no utf-8 \xe9.png", b":smile: [bold].png",
)  # fmt: skip


def test_names_do_nothing_to_the_terminal_are_written_exactly_and_closed_folders_are_named(
    weights: pathlib.Path, images: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "odd"
    closed = folder / "closed \x1b[2J"
    closed.mkdir(parents=True)
    real = os.scandir

    def scandir(path: str) -> object:
        if str(path) == str(closed):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    for name in ODD_NAMES:
        (folder / os.fsdecode(name)).write_bytes((images / "0.png").read_bytes())
        (folder / os.fsdecode(b"broken " + name)).write_text("no image")
    labels = tmp_path / "labels.json"
    labels.write_text(json.dumps([f"\x1b[{number}m" for number in range(7)]))
    result = run(
        folder, "-w", weights, "--labels", labels, "--device", "cpu", "--json", tmp_path / "o.json", "--csv",
        tmp_path / "o.csv",
    )  # fmt: skip
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.exception
    written = result.output + result.stderr
    assert not [each for each in written if not each.isprintable() and each != "\n"]
    for text in (r"\x1b[31mred\x1b[0m.png", r"two\nlines", r"turned\u202eround", r"\udce9", ":smile: [bold]"):
        assert text in result.stdout and text in result.stderr
    files = {str(folder / os.fsdecode(name)) for name in ODD_NAMES}
    found = json.loads((tmp_path / "o.json").read_bytes().decode("utf-8", "strict"))
    assert {entry["file"] for entry in found["images"]} == files
    unreadable = [entry["file"] for entry in found["unreadable"]]
    assert unreadable[0] == str(closed)
    assert {name.replace("broken ", "") for name in unreadable[1:]} == files
    assert r"closed \x1b[2J: the folder cannot be opened: Permission denied" in result.stderr
    assert "7 of 14 images could not be read" in result.stderr
    assert "folders that could not be opened: 1" in result.stderr
    with open(tmp_path / "o.csv", newline="", encoding="utf-8", errors="surrogateescape") as file:
        assert {row["file"] for row in csv.DictReader(file)} == files


@pytest.mark.parametrize(
    ("options", "normalize"),
    [
        (("-b", 2), None),
        (("-b", 64), None),
        (("--mean", 0.5, 0.4, 0.3, "--std", 0.2, 0.3, 0.5), ((0.5, 0.4, 0.3), (0.2, 0.3, 0.5))),
        (("--std", 0.5, 0.25, 0.3), ((0.0, 0.0, 0.0), (0.5, 0.25, 0.3))),
    ],
)
def test_readable_images_end_well_with_any_batch_and_by_mean_and_deviation(
    options: tuple[object, ...],
    normalize: Any,
    network: models.ResNet,
    weights: pathlib.Path,
    images: pathlib.Path,
    tmp_path: pathlib.Path,
) -> None:
    path = tmp_path / "o.json"
    result = run(images, "-w", weights, "--device", "cpu", "--dtype", "fp32", "--json", path, *options)
    assert result.exit_code == 0, result.output
    chances = expected(network, sorted(images.glob("*.png")), SMALL, normalize).topk(5)
    found = [entry["top"] for entry in json.loads(path.read_text())["images"]]
    assert [[guess["class"] for guess in top] for top in found] == chances.indices.tolist()
    for top, values in zip(found, chances.values.tolist(), strict=True):
        assert [guess["probability"] for guess in top] == pytest.approx(values, rel=1e-3)


def test_photographs_and_small_images_are_cut_and_normalized_as_is_usual_for_them() -> None:
    with torch.device("meta"):
        small, large = (models.resnet18(7, is_small) for is_small in (True, False))
    mean, std = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
    for usual, own in (
        (UNIT, lambda *given: normalization(small, *given)),
        (NORMALIZE, lambda *given: normalization(large, *given)),
        (UNIT, lambda *given: normalization_at(64, *given)),
        (NORMALIZE, lambda *given: normalization_at(65, *given)),
    ):
        assert own() == usual
        assert own(mean) == (mean, usual[1]) and own(None, std) == (usual[0], std)
    assert (crop_of(small), crop_of(large)) == (Crop(32, 32), Crop(256, 224))
    assert [crop_to(side) for side in (8, 64, 65, 224)] == [
        Crop(8, 8), Crop(64, 64), Crop(74, 65), Crop(256, 224),
    ]  # fmt: skip


class ReachedError(Exception):
    """Stop a command once its options have been recorded."""


def test_options_arrive_where_they_are_used(
    weights: pathlib.Path, images: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each value is unique, so that no two can be swapped."""
    arrived: list[Any] = []

    def reached(*given: Any, **named: Any) -> Any:
        arrived.extend((given, named))
        raise ReachedError

    labels = tmp_path / "labels.txt"
    network = (
        "-w", weights, "--labels", labels, "--dtype", "bf16", "--mean", 0.1, 0.2, 0.3, "--std", 0.4, 0.5, 0.6,
    )  # fmt: skip
    asked = ClassifierRequest(weights, None, labels, "bf16", (0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    with monkeypatch.context() as patch:  # other modules that are imported meanwhile would keep it
        patch.setattr("escalade.commands.classifiers.build_classifier", reached)
        result = run(images, *network, "--batch", 3, "--device", "cpu")
    assert isinstance(result.exception, ReachedError), result.output
    assert arrived == [(asked, "cpu", 3, sorted(images.glob("*.png"))), {}]

    pytest.importorskip("ray", reason="Ray is not installed: pip install 'escalade[ray]'")
    arrived.clear()
    monkeypatch.setattr("escalade.commands.clusters.classify", reached)
    result = run(
        images, *network, "--ray", "auto", "--output", "there", "--workers", 2, "--device", "cpu", "--batch", 3,
        "--top", 4, "--shard", 6, "--format", "csv",
    )  # fmt: skip
    assert isinstance(result.exception, ReachedError), result.output
    (_, _, *given), named = arrived
    assert given == ["auto", asked, [str(images)], "there"]
    assert named == {"workers": 2, "device": "cpu", "batch": 3, "top": 4, "shard": 6, "form": "csv"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("top", [1, 5, 40])
def test_the_likeliest_classes_are_those_of_softmax(dtype: torch.dtype, top: int) -> None:
    """Distinct numbers that no dtype rounds to the same value."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.stack([torch.randperm(40, generator=generator) / 4 - 5 for _ in range(70)]).to(dtype)
    classes, chances = top_classes(logits, top)
    expected = logits.double().softmax(1).topk(top, 1)
    assert torch.equal(classes, expected.indices)
    assert torch.allclose(chances.double(), expected.values, rtol=1e-5)


@pytest.mark.parametrize(("is_terminal", "rows"), [(True, 20), (False, 45)])
def test_a_terminal_shows_the_first_images_and_a_file_all(is_terminal: bool, rows: int) -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=is_terminal, no_color=True, width=90)
    guesses = (Guess(1, "dog", 0.75), Guess(2, "cat", 0.25))
    _show(console, [Prediction(pathlib.Path(f"{number}.jpg"), guesses) for number in range(45)])
    assert written.getvalue().count(".jpg") == rows == written.getvalue().count("dog")
    assert ("and 25 more images: write" in written.getvalue()) is is_terminal


def test_stopping_early_leaves_no_thread(network: models.ResNet, images: pathlib.Path) -> None:
    engine = compile(network, example(2, SMALL), device="cpu", normalize=UNIT)
    before = set(threading.enumerate())
    skipped: list[Unreadable] = []
    files = sorted(images.glob("*.png")) * 20
    names = [str(number) for number in range(7)]
    predictions = predict(engine, files, SMALL, names, batch=2, top=1, skipped=skipped.append)
    assert next(predictions).file == files[0]
    predictions.close()
    assert not skipped
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("escalade-")]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "classify needs --weights FILE"),
        (("-w", "none.pth"), "no such file: none.pth"),
        (("-w", "{weights}", "--dtype", "fp64"), "dtype 'fp64'"),
        (("-w", "{weights}", "--labels", "{weights}"), "cannot be read as labels"),
        (("-w", "{weights}", "--json", "{images}"), "is a folder; pass a regular file"),
        (("-w", "{weights}", "--csv", "{weights}/o.csv"), "cannot be written"),
        (("-w", "{weights}", "--csv", "/dev/null"), "is a device or a pipe"),
        (("-w", "no\n\x1b[31m.pth"), r"no such file: no\n\x1b[31m.pth"),
        (("-w", "{weights}\n.txt"), "no such file"),
        (("-w", "{weights}", "--labels", "no\n\x1b[31m"), r"no\n\x1b[31m cannot be read as labels"),
    ],
)
def test_mistakes_are_answered_by_one_sentence(
    arguments: tuple[str, ...],
    sentence: str,
    weights: pathlib.Path,
    images: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    filled = [argument.format(weights=weights, images=images) for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["escalade", "classify", str(images), *filled])
    with pytest.raises(SystemExit) as end:
        cli.main()
    said = capsys.readouterr().err.strip()
    assert end.value.code == 1
    assert sentence in said and len(said.splitlines()) == 1


@pytest.fixture(scope="module")
def photographs() -> tuple[pathlib.Path, list[pathlib.Path], torch.Tensor]:
    file = DATA / "resnet18_imagenet_rebuilt_fp16.safetensors"
    files = sorted((DATA / "images").glob("*.JPEG"))
    if not file.is_file() or not files:
        pytest.skip(
            f"ResNet-18's weights and photographs are not in {DATA}; set ESCALADE_DATA to a folder with them"
        )
    return file, files, expected(models.read_resnet(file), files, Crop(256, 224))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_photographs_are_classified_as_by_pytorch(
    dtype: str, photographs: tuple[pathlib.Path, list[pathlib.Path], torch.Tensor], tmp_path: pathlib.Path
) -> None:
    weights, files, chances = photographs
    path = tmp_path / "o.json"
    result = run(
        DATA / "images", "-w", weights, "--labels", DATA / "imagenet_synsets.txt", "--dtype", dtype,
        "--device", "cpu", "--json", path,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    written = json.loads(path.read_text())["images"]
    assert [entry["file"] for entry in written] == [str(file) for file in files]
    assert [entry["top"][0]["class"] for entry in written] == chances.argmax(1).tolist()
    right = sum(
        entry["top"][0]["label"] == file.name.split("_")[0]
        for entry, file in zip(written, files, strict=True)
    )
    assert right >= 0.7 * len(files), f"{right} of {len(files)}"
