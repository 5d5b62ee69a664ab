"""The demo: its kernels run without a GPU too, and a wrong result stops it."""

from __future__ import annotations

import copy
import dataclasses
import io
import pathlib

import pytest
import torch
import typer
from rich.console import Console
from torch import nn

from escalade.commands import tour
from escalade.device.twin import launch
from escalade_bench.measure import records as store
from escalade_bench.networks.judging import standard
from escalade_bench.networks.workload import Workload


def small(size: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 16, 5)
    ).eval()


def images(count: int, size: int, seed: int, device: torch.device) -> torch.Tensor:
    return torch.randn(count, 8, 4, 4, generator=torch.Generator().manual_seed(seed))


SMALL = Workload("small", small, images, 4, batches=(1,), dtypes=("fp16",), peers={}, parts={})


def test_the_network_of_the_demo_runs_on_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    real = launch.TwinKernel.launch

    def counted(kernel: launch.TwinKernel, *arguments: object, **keywords: object) -> object:
        launched.append(kernel)
        return real(kernel, *arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(launch.TwinKernel, "launch", counted)
    monkeypatch.setattr(tour, "workload", lambda name: SMALL)
    text = io.StringIO()
    tour.show_network(Console(file=text, width=200), "twin")
    assert launched and "compiled in fp16 for the twin" in text.getvalue()
    assert "4 of 4 images" in text.getvalue() and "The kernels agree with PyTorch" in text.getvalue()


def test_a_wrong_result_ends_the_demo() -> None:
    model, x = small(4, 0), images(4, 4, 0, torch.device("cpu"))
    with torch.no_grad():
        right = model(x)
        exact = copy.deepcopy(model).double()(x.double())
    wanted = standard(model, x, "fp16", exact)
    text = io.StringIO()
    tour._compare(Console(file=text), right, right, wanted)
    with pytest.raises(typer.Exit) as end:
        tour._compare(Console(file=text), right + 1, right, wanted)
    assert end.value.exit_code == 1 and "Wrong result" in text.getvalue()


def test_the_network_that_learns_is_planned_and_its_loss_falls() -> None:
    text = io.StringIO()
    console = Console(file=text, width=200)
    tour.show_training(console, "cpu", tour.TWIN_TRAINING)
    assert "step 12: loss 0." in text.getvalue() and "The loss has fallen to" in text.getvalue()
    with pytest.raises(typer.Exit):
        tour.show_training(console, "cpu", dataclasses.replace(tour.TWIN_TRAINING, steps=1))
    assert "The loss has not fallen" in text.getvalue()


def test_the_demo_ends_with_a_report_of_its_records(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = io.StringIO()
    tour.write_report(Console(file=text, width=200))
    assert "No report was written: there are no records under results" in text.getvalue()
    record = store.Record(
        "relu", "1M", "fp32", "flat", 1, "escalade", "naive", median_us=9.0, gpu="NVIDIA H200"
    )
    store.file_away(tour.RESULTS, [record])
    tour.write_report(Console(file=text))
    assert f"wrote {tmp_path / 'report.html'}" in capsys.readouterr().out
    assert (tmp_path / "report.html").read_text().startswith("<!DOCTYPE html>")
