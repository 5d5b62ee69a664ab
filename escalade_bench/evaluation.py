"""A ResNet with real weights over labeled images: accuracy by dtype, and the error against PyTorch's fp32 logits.

All systems run a batch before the next one is decoded, so that a data set of any size is read once.
"""

from __future__ import annotations

import copy
import csv
import io
import json
import math
import pathlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from escalade import models
from escalade.engine import compile
from escalade.errors import UnsupportedError
from escalade.models import ResNet, read_resnet
from escalade.ops.base.switches import precision
from escalade.terminal_text import counted, printable
from escalade_apps.classify.decoders import decoder_for
from escalade_apps.classify.images import Source, Unreadable
from escalade_apps.classify.labels import LabeledImage, find_labeled
from escalade_apps.classify.prediction import batches
from escalade_apps.classify.preparation import Normalization, compile_classifier, crop_of, normalization
from escalade_bench.campaign.units import Say, Session, Unit, command
from escalade_bench.ladder import free
from escalade_bench.measure.currency import Made
from escalade_bench.measure.records import Record
from escalade_bench.networks import data as installed
from escalade_bench.networks.judging import MOST

SUFFIX = "_evaluation"
"""Suffix of the workload of these records, behind the network's name."""
PYTORCH = "torch"
FEW = 5
DTYPES = ("fp32", "tf32", "fp16", "bf16")
NETWORKS = {"resnet18": 18, "resnet34": 34, "resnet50": 50}
"""Layers of each network that can be evaluated."""


@dataclass(frozen=True)
class Task:
    """A named network with the weights of a file, and the images to classify."""

    network: str
    model: ResNet
    weights: pathlib.Path
    folder: pathlib.Path
    images: Sequence[LabeledImage]
    normalize: Normalization
    batch: int

    @property
    def files(self) -> list[pathlib.Path]:
        return [image.file for image in self.images]


class _Score:
    """Running totals of one system's predictions, compared with PyTorch's."""

    def __init__(self) -> None:
        self.images = self.first = self.among_few = self.same = 0
        self.largest = self._off = self._all = 0.0

    def add(self, logits: torch.Tensor, expected: torch.Tensor, classes: torch.Tensor) -> None:
        few = logits.topk(min(FEW, logits.shape[1]), 1).indices
        right = few == classes[:, None]
        self.images += len(classes)
        self.first += int(right[:, 0].sum())
        self.among_few += int(right.any(1).sum())
        self.same += int((few[:, 0] == expected.argmax(1)).sum())
        off = (logits - expected).double()
        self.largest = max(self.largest, float(off.abs().max()))
        self._off += float(off.square().sum())
        self._all += float(expected.double().square().sum())

    @property
    def error(self) -> float:
        """Difference relative to PyTorch's logits, over all images; infinite if a logit is not finite."""
        found = math.sqrt(self._off / self._all) if self._all else 0.0
        return found if math.isfinite(found) else math.inf


def evaluate(task: Task, dtypes: Sequence[str], device: str, say: Callable[[str], None]) -> list[Record]:
    """Return a record of PyTorch in fp32 and one of Escalade per dtype; `device` is an argument of `compile`."""
    engines = {}
    for dtype in dtypes:
        say(f"{task.network}: compiling in {dtype}")
        engines[dtype] = compile_classifier(task.model, dtype, device, task.batch, task.normalize, task.files)
    home = next(iter(engines.values())).device
    model = copy.deepcopy(task.model).to(home).eval()
    scores = {name: _Score() for name in ("", *dtypes)}
    numbers: dict[Source, int] = {image.file: image.number for image in task.images}
    seen: deque[list[Source]] = deque()
    decoder = decoder_for(home)
    given = batches(task.files, crop_of(model), task.batch, seen, _refuse, decoder)
    with torch.no_grad(), closing(given):
        for images in given:
            names = seen.popleft()
            say(f"{task.network}: {scores[''].images + len(names):,} of {counted(len(task.images), 'image')}")
            x = images.to(home)
            classes = torch.tensor([numbers[name] for name in names])
            with precision("fp32"):
                expected = model(installed.normalised(x, task.normalize))[: len(names)].cpu()
            scores[""].add(expected, expected, classes)
            for dtype, engine in engines.items():
                scores[dtype].add(engine(x)[: len(names)].float().cpu(), expected, classes)
    return [_record(task, dtype, score, decoder.name) for dtype, score in scores.items()]


def _refuse(image: Unreadable) -> None:
    """Raise: skipping the image would give the accuracy of another data set."""
    raise UnsupportedError(f"{printable(image.file)} cannot be read: {printable(image.reason)}")


def _record(task: Task, dtype: str, score: _Score, decoder: str) -> Record:
    """Return the record of Escalade in a dtype, or of PyTorch without one."""
    count, error, most = score.images, score.error, MOST[dtype or "fp32"]
    failure = "" if error <= most else f"its logits are off by {error:.1e}, more than {most:.1e}"
    problem = f"{crop_of(task.model).side}_{task.folder.absolute().name}_n{count}"
    system = "escalade" if dtype else PYTORCH
    record = Record(
        task.network + SUFFIX, problem, dtype or "fp32", "", count, system, "", accuracy=score.first / count,
        config={
            "top5": score.among_few / count,
            "agreement": score.same / count,
            "difference": score.largest,
            "weights": task.weights.name,
            "decoder": decoder,
        },
    )  # fmt: skip
    if not dtype:
        return record
    return replace(record, error=error if math.isfinite(error) else None, tolerance=most, failure=failure)


def as_json(records: Sequence[Record], data: pathlib.Path, device: str) -> str:
    about: dict[str, Any] = {
        "network": records[0].workload.removesuffix(SUFFIX),
        "weights": records[0].config["weights"],
        "data": str(data),
        "images": records[0].batch,
        "device": device,
        "decoder": records[0].config["decoder"],
        "systems": [_figures(record) for record in records],
    }
    return json.dumps(about, indent=1) + "\n"


def as_csv(records: Sequence[Record]) -> str:
    text = io.StringIO()
    rows = [_figures(record) for record in records]
    writer = csv.DictWriter(text, rows[0])
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _figures(r: Record) -> dict[str, Any]:
    own = {
        "system": r.system,
        "dtype": r.dtype,
        "images": r.batch,
        "top1": r.accuracy,
        "top5": r.config["top5"],
    }
    beside = {"agreement": r.config["agreement"], "largest_difference": r.config["difference"]}
    return {**own, **beside, "error": r.error, "failure": r.failure}


NETWORK = "resnet18"
FILES = ("resnet18_imagenet_rebuilt_fp16.safetensors", "images", "imagenet_synsets.txt")
"""Weights, photographs, and the names of the classes."""
_BATCH = 32
_SECONDS = 20.0


def units() -> Iterator[Unit]:
    """The one unit, all dtypes at once: an image is decoded once for all of them."""
    if missing():
        return
    options = zip(("--weights", "--data", "--classes"), map(installed.find, FILES), strict=True)
    asked = (word for option in options for word in option)
    yield Unit(
        f"evaluation/{NETWORK}",
        f"right answers of {NETWORK} with real weights",
        command("bench", "evaluate", NETWORK, *asked),
        _SECONDS,
        _measure,
        _made,
        DTYPES,
        alone=True,
    )


def missing() -> str:
    """Return why there is no such unit here; empty if there is."""
    absent = installed.missing(*FILES)
    return absent and f"{absent}, so right answers are not among the units"


def _measure(session: Session, say: Say) -> Iterator[list[Record]]:
    weights, photographs, classes = map(installed.find, FILES)
    assert weights is not None and photographs is not None
    model = read_resnet(weights)
    images = find_labeled(photographs, model.fc.out_features, classes)
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
