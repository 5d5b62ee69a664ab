"""The command `classify`: image files through a network."""

from __future__ import annotations

import pathlib
import time
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import TimeRemainingColumn
from rich.text import Text

from escalade.classify import output
from escalade.classify.decoders import decoder_for
from escalade.classify.images import Unreadable, find
from escalade.classify.labels import class_labels
from escalade.classify.prediction import Prediction, predict
from escalade.classify.preparation import (
    classes_of,
    compiled,
    crop_of,
    crop_to,
    normalization,
    normalization_at,
    side_of,
)
from escalade.commands.devices import engine_device
from escalade.commands.networks import is_saved
from escalade.commands.networks import network as named_network
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
    network: Annotated[
        str | None,
        typer.Option(
            "--network",
            "-n",
            help="Instead of weights: a constructor as MODULE:name, a .pt2 file of torch.export, or a saved engine.",
            show_default=False,
        ),
    ] = None,
    labels: Annotated[
        pathlib.Path | None, typer.Option(help="The names of the classes: one a line, or a .json list.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            "-t",
            help="fp32, tf32, fp16, bf16 or fp8 (ranges from the first batch). Without it: a saved engine's, or fp16.",
            show_default=False,
        ),
    ] = None,
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
    """What is on images, by a network that you have. Fails at the end if an image could not be read."""
    console, status = Console(), Console(stderr=True)  # results, and progress and complaints
    if weights is not None and network is not None:
        raise UnsupportedError("--weights are of a ResNet and --network brings its own; give one of them")
    if weights is None and network is None:
        raise UnsupportedError(
            "classify needs --weights FILE, a ResNet's .safetensors, .pth or .pt file with the names of torchvision or "
            "timm; Escalade comes with none. One way to get one: torch.save(torchvision.models.resnet18("
            "weights='DEFAULT').state_dict(), 'resnet18.pth'). Or --network: a constructor, a program, a saved engine"
        )
    if dtype is not None:
        require_dtype(dtype)
    where = engine_device(device)
    files, closed = find(tuple(images))
    batch = min(batch, len(files))
    if weights is not None:
        model = read_resnet(weights)
        names = class_labels(model.fc.out_features, labels)
        title, crop = f"ResNet-{model.layers}", crop_of(model)
        with status.status(f"Compiling {title} in {dtype or 'fp16'} for {where}"):
            engine = compiled(model, dtype or "fp16", where, batch, normalization(model, mean, std), files)
    else:
        assert network is not None
        if is_saved(network) and (mean is not None or std is not None):
            raise UnsupportedError(f"{network} was saved with its own mean and standard deviation")
        if dtype == "fp8":
            raise UnsupportedError("fp8 is for --weights, and for engines that were saved in it")
        title = shown(network)
        with status.status(f"Compiling {title} for {where}"):
            engine, _ = named_network(
                network, batch, dtype, where,
                normalize=lambda shape: normalization_at(side_of(shape), mean, std),
            )  # fmt: skip
        names = class_labels(classes_of(engine), labels)
        crop = crop_to(side_of(engine.graph.inputs[0].shape))

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
        "network": title,
        "weights": str(weights or network),
        "dtype": engine.dtype,
        "device": where,
        "batch": batch,
        "decoder": decoder_for(engine.device).name,
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
        f"{about['network']}, {about['dtype']}, batches of {about['batch']}, on {about['device']}, images by "
        f"{about['decoder']}",
        highlight=False,
    )
    for each in skipped:
        status.print(Text.assemble(("skipped", "red"), f" {shown(each.file)}: {shown(each.reason)}"))
    images = len(skipped) - folders
    if images:
        status.print(f"[red]{images:,} of {read + images:,} images could not be read[/]", highlight=False)
    if folders:
        status.print(f"[red]folders that could not be opened: {folders:,}[/]", highlight=False)
