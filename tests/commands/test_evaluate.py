"""`escalade bench evaluate`: answers match plain PyTorch, in the table, in files and in records."""

from __future__ import annotations

import csv
import json
import pathlib

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from escalade import cli, models
from escalade.models.resnet import BasicBlock
from escalade_bench import evaluation
from escalade_bench.measure.records import load

CLASSES = 7


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ResNet-10 in place of ResNet-18."""
    monkeypatch.setitem(evaluation.NETWORKS, "resnet18", 10)


def network() -> models.ResNet:
    return models.ResNet(BasicBlock, (1, 1, 1, 1), CLASSES, small_images=True)


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["evaluate", *map(str, arguments)])


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    torch.manual_seed(0)
    model = network().eval()
    path = tmp_path_factory.mktemp("weights") / "net.pth"
    torch.save(model.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def data(weights: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Five images, labeled by PyTorch's ranking: two with its first class, two with its second, one with its last."""
    folder = tmp_path_factory.mktemp("data")
    model = models.load_resnet(network(), weights)
    for number, rank in enumerate((0, 0, 1, 1, CLASSES - 1)):
        pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        x = torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255
        with torch.no_grad():
            label = int(model(x)[0].argsort(descending=True)[rank])
        (folder / str(label)).mkdir(exist_ok=True)
        Image.fromarray(pixels).save(folder / str(label) / f"{number}.png")
    return folder


def test_right_answers_against_pytorch(
    weights: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    result = run(
        "resnet18", "-w", weights, "-d", data, "-t", "fp32", "-b", 2, "--device", "cpu", "--json",
        tmp_path / "o.json", "--csv", tmp_path / "o.csv", "--results", tmp_path / "results",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "o.json").read_text())
    assert (written["network"], written["images"], written["device"]) == ("resnet18", 5, "cpu")
    pytorch, ours = written["systems"]
    assert (pytorch["system"], ours["system"], ours["dtype"]) == ("torch", "escalade", "fp32")
    for system in (pytorch, ours):
        assert (system["top1"], system["top5"], system["agreement"]) == (0.4, 0.8, 1.0)
    assert 0 < ours["error"] < 1e-5 and ours["largest_difference"] < 1e-4
    with open(tmp_path / "o.csv", newline="") as file:
        assert [row["top1"] for row in csv.DictReader(file)] == ["0.4", "0.4"]
    (path,) = (tmp_path / "results").glob("*/resnet18_evaluation.jsonl")
    assert [record.accuracy for record in load(path)] == [0.4, 0.4]
    assert "40.00%" in result.output and "80.00%" in result.output


def test_logits_that_are_off_fail(
    weights: pathlib.Path, data: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong:
        device = torch.device("cpu")

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return torch.full((len(x), CLASSES), torch.nan).index_fill_(1, torch.tensor([0]), 1.0)

    monkeypatch.setattr(evaluation, "compile_classifier", lambda *_: Wrong())
    result = run("resnet18", "-w", weights, "-d", data, "-t", "fp16", "--limit", 2, "--device", "cpu")
    assert result.exit_code == 1 and "failed:" in result.output and "logits are off by inf" in result.output


def test_networks_that_cannot_be_evaluated_are_a_sentence(
    weights: pathlib.Path, data: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ("-w", weights, "-d", data, "--device", "cpu")
    broken = tmp_path / "broken" / "1"
    broken.mkdir(parents=True)
    (broken / "a.png").write_text("no image")
    monkeypatch.setattr(evaluation, "compile_classifier", lambda *_: torch.zeros(1))
    for arguments, sentence in (
        (("vgg16_bn", *asked), "there is no network 'vgg16_bn' to evaluate; known: resnet18"),
        (("resnet50", *asked), "net.pth has the weights of a ResNet-10, not of resnet50"),
        (("resnet18", *asked, "-t", "int4"), "dtype 'int4'"),
        (("resnet18", "-w", weights, "-d", tmp_path / "broken", "--device", "cpu"), "a.png cannot be read: not an"),
    ):  # fmt: skip
        assert sentence in str(run(*arguments).exception), sentence
