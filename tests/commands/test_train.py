"""The command `train`: its output and files."""

from __future__ import annotations

import base64
import contextlib
import io
import pathlib
import signal
from typing import Any

import pytest
import torch
from PIL import Image

from escalade.commands import training
from escalade_apps.train import data, logs
from escalade_apps.train.parallel import LostError, Processes
from escalade_apps.train.probing import ProbeResult
from escalade_apps.train.settings import Settings
from escalade_apps.train.trainer import BEST
from escalade_bench.learning import learning_record
from tests.commands.support import run, said_by
from tests.train.quick import hasten

SMALL = "--data synthetic:24 --side 8 --width 4 --batch 8 --device cpu".split()


def test_a_run_is_begun_and_gone_on_with(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hasten(monkeypatch)
    folder = str(tmp_path / "run")
    begun = run("train", "autoencoder", *SMALL, "--epochs", "1", "--output", folder)
    assert begun.exit_code == 0, begun.output
    assert "411 parameters, on 24 images of synthetic: 3 steps of 8 in fp32 on cpu" in begun.output
    assert "epoch 1, step 3: test loss 0." in begun.output and "all 3 steps done" in begun.output
    resumed = run("train", "autoencoder", "--device", "cpu", "--epochs", "2", "--output", folder, "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert "Resuming after step 3" in resumed.output and "all 6 steps done" in resumed.output
    assert f"the weights in {BEST}" in begun.output and "best test loss 0." in begun.output
    steps = [line["step"] for line in logs.read(tmp_path / "run" / "log.jsonl") if line["event"] == "step"]
    assert steps == [1, 2, 3, 4, 5, 6]
    record = learning_record(
        Settings(
            "autoencoder", "synthetic", 2, 8, 0.1, "sgd", "constant", 0.0, "fp32", 0, 4, 8, False, 0, 0.1
        ),
        data.read("synthetic:24", side=8, held_out=0.1, seed=0),
        tmp_path / "run",
        seconds=3.0,
        judgement=ProbeResult(32, 0.6, 0.4),
    )
    assert (
        record.config["seconds_per_epoch"] == 1.5
        and record.accuracy == record.config["classifier"]["test"] == 0.4
    )
    assert record.images_per_s == pytest.approx(2 * 24 / 3)
    assert record.workload == "autoencoder_learning" and record.problem == "synthetic_b8"
    assert [step for step, _ in record.config["losses"]] == steps
    assert [step for step, *_ in record.config["evaluations"]] == [3, 6]
    with Image.open(io.BytesIO(base64.b64decode(record.config["reconstructions"]))) as sheet:
        assert sheet.width == 8 * 10 - 2, "eight images of eight pixels, two between them"


class ReachedError(Exception):
    """Stop a command once its options have been recorded."""


def test_options_arrive_at_the_trainer(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each value is unique, so that no two can be swapped."""
    given = {
        "data": "synthetic:24", "epochs": 11, "steps": 12, "batch": 13, "lr": 0.14, "optimizer": "adamw",
        "schedule": "cosine", "weight_decay": 0.15, "dtype": "bf16", "seed": 16, "width": 17, "side": 18,
        "shift": 19, "held_out": 0.2, "patience": 21, "every": 22,
    }  # fmt: skip
    arrived: list[Any] = []

    def reached(*positions: Any, **named: Any) -> Any:
        arrived.extend((positions, named))
        raise ReachedError

    monkeypatch.setattr("escalade_apps.train.trainer.trainer", reached)
    options = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    folder, weights = tmp_path / "run", tmp_path / "weights.pt"
    further = [
        "--flip",
        "--output",
        str(folder),
        "--weights",
        str(weights),
        "--resume",
        "--tensorboard",
        "--csv",
    ]
    result = run("train", "autoencoder", *options, *further, "--device", "twin")
    assert isinstance(result.exception, ReachedError), result.output
    (task, found, where, own), named = arrived
    assert (task, found, where) == ("autoencoder", given | {"flip": True}, folder)
    assert own.device.type == "cpu" and named == {
        "resume": True, "weights": weights, "twin": True, "tensorboard": True, "csv": True,
    }  # fmt: skip
    arrived.clear()
    run("train", "resnet18", "--no-flip", "--device", "cpu")
    (task, found, where, _), named = arrived
    assert (task, found, where) == ("resnet18", {"flip": False}, training.RUNS / "resnet18")
    assert named == {"resume": False, "weights": None, "twin": False, "tensorboard": False, "csv": False}


def test_a_run_that_ends_before_its_evaluation_reports_only_existing_results(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hasten(monkeypatch)
    stop = training._StopFlag()
    monkeypatch.setattr(training, "_signals", lambda own: contextlib.nullcontext(stop))
    for stop.signal, status in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        folder = tmp_path / str(status)
        folder.mkdir()
        ended = run("train", "autoencoder", *SMALL, "--output", str(folder), "--resume")
        assert ended.exit_code == status, ended.output
        assert "No checkpoint in" in ended.output and "stopped at step" in ended.output
        assert not (folder / BEST).exists()
        assert BEST not in ended.output and "best test loss" not in ended.output


def test_mistakes_are_answered_by_one_sentence(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    output = ("--output", str(tmp_path / "run"), "--device", "cpu")
    for arguments, sentence in (
        (("train", "vgg"), "task 'vgg': supported are autoencoder, resnet18"),
        (("train", "autoencoder", "--data", "nowhere"), "nowhere does not exist; supported are CIFAR-10"),
        (("train", "autoencoder", "--results", str(tmp_path)), "it needs --device cuda or twin"),
        (
            ("train", "autoencoder", "--data", "synthetic:999999999"),
            "999,999,999 images of 32 x 32: needs at least",
        ),
        (
            ("train", "autoencoder", *SMALL, "--width", "500000"),
            "autoencoder of width 500,000: needs at least",
        ),
        (("train", "resnet18", "--classifier"), "--classifier needs the autoencoder"),
        (("train", "autoencoder", "--resume"), "--resume: there is no folder"),
    ):
        assert sentence in said_by(*arguments, *output, monkeypatch=monkeypatch, capsys=capsys)
    assert not (tmp_path / "run").exists()


def test_a_request_to_end_waits_for_the_step_and_a_second_does_not() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with training._signals(Processes(torch.device("cpu"))) as stop:
        assert not stop()
        signal.raise_signal(signal.SIGTERM)
        assert stop() and stop.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    with (
        pytest.raises(LostError, match="process 1 of 2 was terminated"),
        training._signals(Processes(torch.device("cpu"), 1, 2)),
    ):
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_stays_ignored_where_it_was() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with training._signals(Processes(torch.device("cpu"))) as stop:
            signal.raise_signal(signal.SIGINT)
            assert not stop()
            signal.raise_signal(signal.SIGTERM)
            assert stop()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
