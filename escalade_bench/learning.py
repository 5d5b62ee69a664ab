"""Training runs as records: loss by step, evaluations, reconstructions; and the campaign's training run."""

from __future__ import annotations

import base64
import pathlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch

from escalade import models
from escalade.engine.training.step import plan_training_step
from escalade.terminal_text import counted
from escalade_apps.train import logs, pictures
from escalade_apps.train.data.images import Dataset
from escalade_apps.train.parallel import processes
from escalade_apps.train.probing import Probe, ProbeResult
from escalade_apps.train.settings import Settings
from escalade_apps.train.trainer import LOG, RECONSTRUCTIONS, trainer
from escalade_bench.campaign.units import Say, Session, Unit, command
from escalade_bench.measure.currency import Made
from escalade_bench.measure.records import Record
from escalade_bench.networks.data import find

SUFFIX = "_learning"
"""Suffix of the workload of these records, after the task's name."""
MOST_POINTS = 256
"""Most losses in a record: each is the mean over a stretch of steps."""


def learning_record(
    settings: Settings,
    dataset: Dataset,
    folder: pathlib.Path,
    seconds: float | None = None,
    judgement: ProbeResult | None = None,
) -> Record:
    """Return the record of a run: its course, duration, and the accuracy of a classifier on its features."""
    lines = logs.read(folder / LOG)
    evaluations = [line for line in lines if line["event"] == logs.EVALUATION]
    last = evaluations[-1] if evaluations else {}
    images = settings.epochs * len(dataset.train)
    said = {name: value for name, value in settings.as_dict().items() if name not in ("task", "data")}
    return Record(
        settings.task + SUFFIX,
        f"{pathlib.Path(dataset.name).name}_b{settings.batch}",
        settings.dtype,
        "nhwc",
        settings.batch,
        "escalade",
        "",
        config=said
        | {
            "images": len(dataset.train),
            "losses": _means([(line["step"], line["loss"]) for line in lines if line["event"] == logs.STEP]),
            "evaluations": [[line["step"], line["loss"], line.get("accuracy")] for line in evaluations],
            "reconstructions": _sheet(folder / RECONSTRUCTIONS, dataset),
            "seconds_per_epoch": None if seconds is None else seconds / settings.epochs,
            "classifier": None if judgement is None else asdict(judgement),
        },
        images_per_s=None if seconds is None else images / seconds,
        accuracy=judgement.test if judgement else last.get("accuracy"),
    )


def _means(losses: list[tuple[int, float]]) -> list[list[Any]]:
    """Return the last step of each stretch with its mean loss."""
    length = -(-len(losses) // MOST_POINTS) or 1
    stretches = [losses[first : first + length] for first in range(0, len(losses), length)]
    return [[some[-1][0], float(f"{sum(loss for _, loss in some) / len(some):.6g}")] for some in stretches]


def _sheet(path: pathlib.Path, dataset: Dataset) -> str:
    """Return images and their reconstructions as a PNG in base64; empty for a network without reconstructions."""
    if not path.is_file():
        return ""
    _, rows, columns, _ = dataset.test.pixels.shape
    return base64.b64encode(pictures.reduced(path, rows, columns)).decode()


DATA = "cifar-10-batches-bin"
TASK, DTYPE, EPOCHS, BATCH = "autoencoder", "fp16", 20, 256
_SECONDS = 45.0


def units() -> Iterator[Unit]:
    """Yield the unit if CIFAR-10 is available."""
    found = find(DATA)
    if found is None:
        return
    asked = ("--data", found, "--epochs", EPOCHS, "--batch", BATCH, "--dtype", DTYPE, "--classifier")
    yield Unit(
        f"learning/{TASK}/{DTYPE}",
        f"training of the {TASK} on CIFAR-10",
        command("train", TASK, *asked),
        _SECONDS,
        _measure,
        _made,
        alone=True,
    )


def _measure(session: Session, say: Say) -> Iterator[list[Record]]:
    given = {"data": str(find(DATA)), "epochs": EPOCHS, "batch": BATCH, "dtype": DTYPE}
    with tempfile.TemporaryDirectory() as name, processes(session.device) as own:
        folder = pathlib.Path(name) / "run"
        run = trainer(TASK, given, folder, own)
        assert isinstance(run.model, models.ConvAutoencoder)
        say(f"{TASK}: {counted(EPOCHS, 'epoch')} of {counted(len(run.dataset.train), 'image')}")
        began = time.monotonic()
        run.run(lambda news: None)
        seconds = time.monotonic() - began
        say(f"{TASK}: fitting a classifier to its features")
        probe = Probe(run.dataset, run.settings.seed)
        judgement = probe.fit(
            run.model, run.normalization, batch=BATCH, dtype=DTYPE, device=session.device.type
        )
        yield [learning_record(run.settings, run.dataset, folder, seconds, judgement)]


def _made(session: Session, record: Record) -> Made:
    model = models.ConvAutoencoder().to(session.device).train()
    x = torch.rand(BATCH, 3, 32, 32, device=session.device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    loss = torch.nn.functional.mse_loss
    return Made.of_plan(plan_training_step(model, loss, optimizer, (x, x), DTYPE, session.card))
