"""A run of training as a record: its loss by step, its evaluations, and what an autoencoder makes of images."""

from __future__ import annotations

import base64
import pathlib
from dataclasses import asdict
from typing import Any

from escalade_apps.train import logs, pictures
from escalade_apps.train.data.images import Dataset
from escalade_apps.train.probing import Judgement
from escalade_apps.train.settings import Settings
from escalade_apps.train.trainer import LOG, RECONSTRUCTIONS
from escalade_bench.measure.records import Record

SUFFIX = "_learning"
"""How the workload of these records ends, behind the task's name."""
MOST_POINTS = 256
"""Steps of which a record has the loss, each that of a stretch of the run in the mean."""


def learning_record(
    settings: Settings,
    dataset: Dataset,
    folder: pathlib.Path,
    seconds: float | None = None,
    judgement: Judgement | None = None,
) -> Record:
    """Return the course of the run in a folder, with its duration and the accuracy of a classifier on its features."""
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
    """The last step of each stretch with the mean loss of it."""
    length = -(-len(losses) // MOST_POINTS) or 1
    stretches = [losses[first : first + length] for first in range(0, len(losses), length)]
    return [[some[-1][0], float(f"{sum(loss for _, loss in some) / len(some):.6g}")] for some in stretches]


def _sheet(path: pathlib.Path, dataset: Dataset) -> str:
    """The images beside what was made of them as a PNG in base64; nothing of a network that makes none."""
    if not path.is_file():
        return ""
    _, rows, columns, _ = dataset.test.pixels.shape
    return base64.b64encode(pictures.reduced(path, rows, columns)).decode()
