"""The unit of training on real images: the loss curve, the time per epoch, and a classifier on the features."""

from __future__ import annotations

import pathlib
import shlex
import tempfile
import time
from collections.abc import Iterator

import torch

from escalade import models
from escalade.engine.training.step import plan_training_step
from escalade_apps.train.parallel import processes
from escalade_apps.train.probing import Probe
from escalade_apps.train.runs import trainer
from escalade_bench.campaign.units import ANY, Say, Session, Unit
from escalade_bench.measure.currency import Made
from escalade_bench.measure.records import Record
from escalade_bench.networks import at_hand
from escalade_bench.networks.judging import UNTIMED
from escalade_bench.networks.learning import learning_record

DATA = "cifar-10-batches-bin"
TASK, DTYPE, EPOCHS, BATCH = "autoencoder", "fp16", 20, 256
_SECONDS = 45.0


def units() -> Iterator[Unit]:
    """Yield the unit where CIFAR-10 is at hand."""
    found = at_hand.find(DATA)
    if found is None:
        return
    asked = ("--data", str(found), "--epochs", str(EPOCHS), "--batch", str(BATCH), "--dtype", DTYPE)
    yield Unit(
        f"learning/{TASK}/{DTYPE}",
        f"training of the {TASK} on CIFAR-10",
        shlex.join(("escalade", "train", TASK, *asked, "--classifier")),
        _SECONDS,
        _measure,
        _made,
    )


def _measure(session: Session, say: Say) -> Iterator[list[Record]]:
    if session.seconds == UNTIMED:
        yield [ANY]
        return
    given = {"data": str(at_hand.find(DATA)), "epochs": EPOCHS, "batch": BATCH, "dtype": DTYPE}
    with tempfile.TemporaryDirectory() as name, processes(session.device) as own:
        folder = pathlib.Path(name) / "run"
        run = trainer(TASK, given, folder, own)
        assert isinstance(run.model, models.ConvAutoencoder)
        say(f"{TASK}: {EPOCHS} epochs of {len(run.dataset.train):,} images")
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
