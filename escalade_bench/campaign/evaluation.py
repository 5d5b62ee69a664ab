"""The unit of right answers with real weights, where weights and labelled photographs are at hand."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

import torch

from escalade import models
from escalade.engine import compile
from escalade.models import read_resnet
from escalade_apps.classify.labelled import find_labelled
from escalade_apps.classify.preparation import normalization
from escalade_bench.campaign.units import Say, Session, Unit
from escalade_bench.ladder import free
from escalade_bench.measure.currency import Made
from escalade_bench.measure.records import Record
from escalade_bench.networks import at_hand
from escalade_bench.networks.evaluation import DTYPES, Task, evaluate
from escalade_bench.networks.judging import UNTIMED

NETWORK = "resnet18"
WEIGHTS, PHOTOGRAPHS, CLASSES = (
    "resnet18_imagenet_rebuilt_fp16.safetensors",
    "images",
    "imagenet_synsets.txt",
)
_BATCH = 32
_SECONDS = 20.0


def units() -> Iterator[Unit]:
    """The one unit, all dtypes at once: an image is decoded once for all of them."""
    if missing():
        return
    weights, photographs, classes = (at_hand.find(name) for name in (WEIGHTS, PHOTOGRAPHS, CLASSES))
    asked = ("--weights", str(weights), "--data", str(photographs), "--classes", str(classes))
    yield Unit(
        f"evaluation/{NETWORK}",
        f"right answers of {NETWORK} with real weights",
        shlex.join(("escalade", "evaluate", NETWORK, *asked)),
        _SECONDS,
        _measure,
        _made,
        DTYPES,
    )


def missing() -> str:
    """Why there is no such unit here; empty if there is."""
    absent = [name for name in (WEIGHTS, PHOTOGRAPHS, CLASSES) if at_hand.find(name) is None]
    where = ", ".join(map(str, at_hand.folders()))
    return f"{', '.join(absent)}: not in {where}, so right answers are not among the units" if absent else ""


def _measure(session: Session, say: Say) -> Iterator[list[Record]]:
    if session.seconds == UNTIMED:
        return
    weights, photographs, classes = (at_hand.find(name) for name in (WEIGHTS, PHOTOGRAPHS, CLASSES))
    assert weights is not None and photographs is not None
    model = read_resnet(weights)
    images = find_labelled(photographs, model.fc.out_features, classes)
    batch = min(_BATCH, len(images))
    task = Task(NETWORK, model, weights, photographs, images, normalization(model), batch)
    yield evaluate(task, DTYPES, session.device.type, say)
    free(session.device)


def _made(session: Session, record: Record) -> Made:
    """Return the plan of a batch of bytes; the weights decide nothing of it."""

    def made() -> Made:
        model = models.resnet18()
        example = models.example(NETWORK, 1)
        engine = compile(
            model, example, dtype=record.dtype, device=session.device, normalize=normalization(model), plans=1
        )
        return Made.of_plan(
            engine.plan(torch.empty(_BATCH, *example.shape[1:], dtype=torch.uint8, device=session.device))
        )

    return session.once(("made", NETWORK, "evaluation", record.dtype), made)
