"""The command `classify`: image files through a network."""

from __future__ import annotations

import os
import pathlib
import time
from enum import StrEnum
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import TimeRemainingColumn
from rich.text import Text

from escalade.commands.classifiers import Asked, classifier
from escalade.commands.devices import engine_device
from escalade.commands.options import ColourDeviation, ColourMean, EngineOn, count, written
from escalade.commands.progress import progress_bar
from escalade.engine.graph.forms import require_dtype
from escalade.errors import UnsupportedError
from escalade.terminal_text import printable
from escalade_apps.classify import output, reading
from escalade_apps.classify.decoders import decoder_for
from escalade_apps.classify.images import Unreadable, find, require_any
from escalade_apps.classify.prediction import Prediction, make_ready, predict

_ROWS = 20
"""Images whose classes a terminal shows."""
_ON_GPU, _ELSEWHERE = 128, 32
"""Images at a time. On a GPU a batch costs the host as much as it does the card, however many there are in it."""


class ResultForm(StrEnum):
    """The kinds of files that a cluster writes results to."""

    parquet = "parquet"
    csv = "csv"


def command(
    images: Annotated[
        list[str],
        typer.Argument(help="Image files, and folders of them; with --ray also URIs.", show_default=False),
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
    batch: Annotated[
        int | None,
        count(
            "--batch",
            "-b",
            help=f"Images at a time. Without it: {_ON_GPU} on a GPU, {_ELSEWHERE} elsewhere and with --ray.",
            show_default=False,
        ),
    ] = None,
    device: EngineOn = None,
    top: Annotated[int, count("--top", help="How many classes to show for an image.")] = 5,
    mean: ColourMean = None,
    std: ColourDeviation = None,
    json: Annotated[
        pathlib.Path | None, written("--json", help="Write the results to this file too.")
    ] = None,
    csv: Annotated[pathlib.Path | None, written("--csv", help="Write the results to this file too.")] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Classify on a cluster of Ray: its address, auto for the one of this machine, or local for one that "
            "is started.",
            show_default=False,
        ),
    ] = None,
    results: Annotated[
        str | None,
        typer.Option(
            "--output",
            help="With --ray: the folder of the results, a path that all machines have or a URI. What is done of the "
            "same job is not done again.",
            show_default=False,
        ),
    ] = None,
    form: Annotated[
        ResultForm, typer.Option("--format", help="With --ray: what results are written as.")
    ] = ResultForm.parquet,
    shard: Annotated[int, count("--shard", help="With --ray: images in a file of results.")] = 4096,
    workers: Annotated[
        int | None,
        count(
            "--workers", help="With --ray: engines. Without it: one a GPU, or one a CPU.", show_default=False
        ),
    ] = None,
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

    asked = Asked(weights, network, labels, dtype, mean, std)
    if ray is not None:
        if results is None or json is not None or csv is not None:
            raise UnsupportedError(
                "--ray writes files to a folder: give --output FOLDER, with --format parquet or csv, and neither "
                "--json nor --csv"
            )
        from escalade.commands import clusters

        clusters.classify(
            console, status, ray, asked, images, results,
            workers=workers, device=device, batch=batch or _ELSEWHERE, top=top, shard=shard, form=form,
        )  # fmt: skip
        return
    if results is not None:
        raise UnsupportedError("--output is for --ray; --json and --csv write what this machine has found")
    where = engine_device(device)
    files, closed = find([_local(image) for image in images])
    require_any(files)
    reading.begin(files)
    batch = min(batch or (_ON_GPU if where == "cuda" else _ELSEWHERE), len(files))
    with status.status(f"Compiling {asked.called} for {where}"):
        found = classifier(asked, where, batch, files)
        decoder = decoder_for(found.engine.device)
        make_ready(found.engine, found.crop, batch, min(top, len(found.labels)))
    skipped: list[Unreadable] = list(closed)
    predictions: list[Prediction] = []
    with progress_bar(status, TimeRemainingColumn()) as progress:
        task = progress.add_task("Classifying", total=len(files))

        def skip(image: Unreadable) -> None:
            skipped.append(image)
            progress.advance(task)

        start = time.perf_counter()
        for prediction in predict(
            found.engine, files, found.crop, found.labels, batch=batch, top=top, skipped=skip
        ):
            predictions.append(prediction)
            if len(predictions) % batch == 0:
                progress.advance(task, batch)
        seconds = time.perf_counter() - start

    about = {
        "network": found.title,
        "weights": str(weights or network),
        "dtype": found.engine.dtype,
        "device": where,
        "batch": batch,
        "decoder": decoder.name,
        "seconds": round(seconds, 4),
    }
    if json is not None:
        output.write(json, output.as_json(predictions, skipped, about))
    if csv is not None:
        output.write(csv, output.as_csv(predictions))
    _show(console, predictions)
    _summarise(console, status, len(predictions), skipped, about, len(closed))
    if skipped:
        raise typer.Exit(1)


def _local(name: str) -> pathlib.Path:
    if "://" in name and not os.path.exists(name):
        raise UnsupportedError(
            f"{printable(name)} is a URI: pass --ray (--ray local for this machine) to read it; paths need no --ray"
        )
    return pathlib.Path(name)


def _show(console: Console, predictions: list[Prediction]) -> None:
    """The classes of all images, on a terminal those of the first: of thousands nobody reads a table there."""
    first = predictions[:_ROWS] if console.is_terminal else predictions
    if first:
        console.print(output.table(first))
    if len(first) < len(predictions):
        more = len(predictions) - len(first)
        console.print(
            f"and {more:,} more images: --csv FILE and --json FILE write the classes of all",
            highlight=False,
            style="dim",
        )


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
        status.print(Text.assemble(("skipped", "red"), f" {printable(each.file)}: {printable(each.reason)}"))
    images = len(skipped) - folders
    if images:
        status.print(f"[red]{images:,} of {read + images:,} images could not be read[/]", highlight=False)
    if folders:
        status.print(f"[red]folders that could not be opened: {folders:,}[/]", highlight=False)
