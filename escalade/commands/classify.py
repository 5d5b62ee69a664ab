"""What the command `classify` does, with progress on the terminal."""

from __future__ import annotations

import pathlib
import time
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from escalade.classify import output
from escalade.classify.images import Crop, Unreadable, find
from escalade.classify.labels import labels
from escalade.classify.predict import Prediction, example, first_images, predict
from escalade.engine import compile
from escalade.engine.graph.forms import require_dtype
from escalade.errors import UnsupportedError
from escalade.models import ResNet, read_resnet
from escalade.shown import shown

Colour = tuple[float, float, float]

PHOTOGRAPHS, SMALL_IMAGES = Crop(256, 224), Crop(32, 32)
"""For ImageNet's stem and for CIFAR's."""
_IMAGENET: tuple[Colour, Colour] = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_PLAIN: tuple[Colour, Colour] = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Options:
    images: tuple[pathlib.Path, ...]
    weights: pathlib.Path | None = None
    labels: pathlib.Path | None = None
    dtype: str = "fp16"
    batch: int = 32
    device: str | None = None
    top: int = 5
    mean: Colour | None = None
    std: Colour | None = None
    json: pathlib.Path | None = None
    csv: pathlib.Path | None = None


def classify(options: Options, console: Console | None = None, status: Console | None = None) -> int:
    """0 if every image could be read. Results go to `console`, progress and complaints to `status`."""
    console, status = console or Console(), status or Console(stderr=True)
    if options.weights is None:
        raise UnsupportedError(
            "classify needs --weights FILE, a ResNet's .safetensors, .pth or .pt file with the names of torchvision or "
            "timm; Escalade comes with none. One way to get one: torch.save(torchvision.models.resnet18("
            "weights='DEFAULT').state_dict(), 'resnet18.pth')"
        )
    require_dtype(options.dtype)
    device = _device(options.device)
    for path in (options.json, options.csv):
        output.require_place(path)
    files, closed = find(options.images)
    model = read_resnet(options.weights)
    names = labels(model.fc.out_features, options.labels)
    crop = SMALL_IMAGES if model.small_images else PHOTOGRAPHS
    batch = min(options.batch, len(files))
    with status.status(f"Compiling ResNet-{model.layers} in {options.dtype} for {device}"):
        normalize = _normalization(model, options)
        engine = compile(
            model,
            example(batch, crop),
            dtype=options.dtype,
            device=device,
            normalize=normalize,
            calibration=first_images(files, crop, batch) if options.dtype == "fp8" else None,
        )

    skipped: list[Unreadable] = list(closed)
    predictions: list[Prediction] = []
    with _progress(status) as progress:
        task = progress.add_task("Classifying", total=len(files))

        def skip(image: Unreadable) -> None:
            skipped.append(image)
            progress.advance(task)

        start = time.perf_counter()
        for prediction in predict(engine, files, crop, names, batch=batch, top=options.top, skipped=skip):
            predictions.append(prediction)
            progress.advance(task)
        seconds = time.perf_counter() - start

    about = {
        "network": f"ResNet-{model.layers}",
        "weights": str(options.weights),
        "dtype": options.dtype,
        "device": device,
        "batch": batch,
        "seconds": round(seconds, 4),
    }
    if options.json is not None:
        output.write(options.json, output.as_json(predictions, skipped, about))
    if options.csv is not None:
        output.write(options.csv, output.as_csv(predictions))
    if predictions:
        console.print(output.table(predictions))
    _summarise(console, status, len(predictions), skipped, about, len(closed))
    return 1 if skipped else 0


def _summarise(
    console: Console,
    status: Console,
    read: int,
    skipped: list[Unreadable],
    about: dict[str, Any],
    folders: int,
) -> None:
    seconds = about["seconds"]
    console.print(
        f"{read:,} images in {seconds:.2f} s, {read / max(seconds, 1e-9):,.0f} a second, decoding included: "
        f"{about['network']}, {about['dtype']}, batches of {about['batch']}, on {about['device']}",
        highlight=False,
    )
    for each in skipped:
        status.print(Text.assemble(("skipped", "red"), f" {shown(each.file)}: {shown(each.reason)}"))
    images = len(skipped) - folders
    if images:
        status.print(f"[red]{images:,} of {read + images:,} images could not be read[/]", highlight=False)
    if folders:
        status.print(f"[red]folders that could not be opened: {folders:,}[/]", highlight=False)


def _device(name: str | None) -> str:
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError(
            "--device cuda needs an NVIDIA GPU that PyTorch can use, and there is none; `escalade doctor` says why, "
            "and --device cpu needs none"
        )
    return str(name)


def _normalization(model: ResNet, options: Options) -> tuple[Colour, Colour]:
    """ImageNet's; none for small images, whose networks differ in it."""
    mean, std = _PLAIN if model.small_images else _IMAGENET
    return options.mean or mean, options.std or std


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
