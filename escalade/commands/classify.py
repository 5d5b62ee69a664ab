"""The command `classify`: image files through a ResNet."""

from __future__ import annotations

import pathlib
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import TimeRemainingColumn
from rich.text import Text

from escalade.classify import output
from escalade.classify.images import Unreadable, find
from escalade.classify.labels import class_labels
from escalade.classify.prediction import Prediction, predict
from escalade.classify.preparation import compiled, crop_of, normalization
from escalade.commands.devices import engine_device
from escalade.commands.options import ColourDeviation, ColourMean, EngineOn, count, written
from escalade.commands.progress import progress_bar
from escalade.engine.graph.forms import require_dtype
from escalade.errors import UnsupportedError
from escalade.models import read_resnet
from escalade.showing import shown


def command(
    images: Annotated[
        list[pathlib.Path], typer.Argument(help="Image files, and folders of them.", show_default=False)
    ],
    weights: Annotated[
        pathlib.Path | None,
        typer.Option(
            "--weights",
            "-w",
            help="A ResNet's .safetensors, .pth or .pt file, named as torchvision or timm do.",
        ),
    ] = None,
    labels: Annotated[
        pathlib.Path | None, typer.Option(help="The names of the classes: one a line, or a .json list.")
    ] = None,
    dtype: Annotated[
        str,
        typer.Option("--dtype", "-t", help="fp32, tf32, fp16, bf16 or fp8 (ranges from the first batch)."),
    ] = "fp16",
    batch: Annotated[int, count("--batch", "-b", help="Images at a time.")] = 32,
    device: EngineOn = None,
    top: Annotated[int, count("--top", help="How many classes to show for an image.")] = 5,
    mean: ColourMean = None,
    std: ColourDeviation = None,
    json: Annotated[
        pathlib.Path | None, written("--json", help="Write the results to this file too.")
    ] = None,
    csv: Annotated[pathlib.Path | None, written("--csv", help="Write the results to this file too.")] = None,
) -> None:
    """What is on images, by a ResNet whose weights you have. Fails at the end if an image could not be read."""
    console, status = Console(), Console(stderr=True)  # results, and progress and complaints
    if weights is None:
        raise UnsupportedError(
            "classify needs --weights FILE, a ResNet's .safetensors, .pth or .pt file with the names of torchvision or "
            "timm; Escalade comes with none. One way to get one: torch.save(torchvision.models.resnet18("
            "weights='DEFAULT').state_dict(), 'resnet18.pth')"
        )
    require_dtype(dtype)
    where = engine_device(device)
    files, closed = find(tuple(images))
    model = read_resnet(weights)
    names = class_labels(model.fc.out_features, labels)
    crop = crop_of(model)
    batch = min(batch, len(files))
    with status.status(f"Compiling ResNet-{model.layers} in {dtype} for {where}"):
        engine = compiled(model, dtype, where, batch, normalization(model, mean, std), files)

    skipped: list[Unreadable] = list(closed)
    predictions: list[Prediction] = []
    with progress_bar(status, TimeRemainingColumn()) as progress:
        task = progress.add_task("Classifying", total=len(files))

        def skip(image: Unreadable) -> None:
            skipped.append(image)
            progress.advance(task)

        start = time.perf_counter()
        for prediction in predict(engine, files, crop, names, batch=batch, top=top, skipped=skip):
            predictions.append(prediction)
            progress.advance(task)
        seconds = time.perf_counter() - start

    about = {
        "network": f"ResNet-{model.layers}",
        "weights": str(weights),
        "dtype": dtype,
        "device": where,
        "batch": batch,
        "seconds": round(seconds, 4),
    }
    if json is not None:
        output.write(json, output.as_json(predictions, skipped, about))
    if csv is not None:
        output.write(csv, output.as_csv(predictions))
    if predictions:
        console.print(output.table(predictions))
    _summarise(console, status, len(predictions), skipped, about, len(closed))
    if skipped:
        raise typer.Exit(1)


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
