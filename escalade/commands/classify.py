"""`escalade classify`: classify image files with a network."""

from __future__ import annotations

import os
import pathlib
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import TimeRemainingColumn
from rich.text import Text

from escalade.commands.options import ColorMean, ColorStd, EngineOn, count, written
from escalade.commands.progress import progress_bar
from escalade.errors import UnsupportedError
from escalade.terminal_text import printable

if TYPE_CHECKING:
    from escalade_apps.classify.images import Unreadable
    from escalade_apps.classify.prediction import Prediction

_ROWS = 20
"""Images listed on a terminal."""
_GPU_BATCH, _DEFAULT_BATCH = 128, 32
"""Default batch sizes. On a GPU the host's cost per batch does not depend on its size, so it is larger there."""


class ResultFormat(StrEnum):
    """File formats for results of a Ray job."""

    parquet = "parquet"
    csv = "csv"


def command(
    images: Annotated[
        list[str],
        typer.Argument(help="Image files and folders; with --ray also URIs.", show_default=False),
    ],
    weights: Annotated[
        pathlib.Path | None,
        typer.Option(
            "--weights",
            "-w",
            help="Weights of a ResNet: a .safetensors, .pth or .pt file with torchvision's or timm's parameter names.",
        ),
    ] = None,
    network: Annotated[
        str | None,
        typer.Option(
            "--network",
            "-n",
            help="Instead of --weights: a constructor (MODULE:name, timm:name), a .pt2 or .onnx file, a folder "
            "with config.json and weights, or a saved engine.",
            show_default=False,
        ),
    ] = None,
    labels: Annotated[
        pathlib.Path | None, typer.Option(help="Class labels: a file with one per line, or a .json list.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            "-t",
            help="fp32, tf32, fp16, bf16, int8 or fp8 (both calibrated with the first batch). Default: that of a saved "
            "engine, else fp16.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        int | None,
        count(
            "--batch",
            "-b",
            help=f"Batch size. Default: {_GPU_BATCH} on a GPU, else {_DEFAULT_BATCH}; {_DEFAULT_BATCH} with --ray.",
            show_default=False,
        ),
    ] = None,
    device: EngineOn = None,
    top: Annotated[int, count("--top", help="Classes reported per image.")] = 5,
    mean: ColorMean = None,
    std: ColorStd = None,
    json: Annotated[
        pathlib.Path | None, written("--json", help="Also write the results to this JSON file.")
    ] = None,
    csv: Annotated[
        pathlib.Path | None, written("--csv", help="Also write the results to this CSV file.")
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            help="Classify on a Ray cluster: its address, auto for the one this machine is in, or local to start one.",
            show_default=False,
        ),
    ] = None,
    results: Annotated[
        str | None,
        typer.Option(
            "--output",
            help="With --ray: folder for the results, a path shared by all machines or a URI. Shards of the same job "
            "that are already there are not repeated.",
            show_default=False,
        ),
    ] = None,
    form: Annotated[
        ResultFormat, typer.Option("--format", help="With --ray: file format of the results.")
    ] = ResultFormat.parquet,
    shard: Annotated[int, count("--shard", help="With --ray: images per result file.")] = 4096,
    workers: Annotated[
        int | None,
        count(
            "--workers",
            help="With --ray: number of engines. Default: one per GPU, or one per CPU without GPUs.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Classify images with your own network. Fails if an image could not be read."""
    from escalade.commands.classifiers import ClassifierRequest, build_classifier
    from escalade.commands.selection import engine_device
    from escalade.engine.graph.forms import require_dtype
    from escalade_apps.classify import output, reading
    from escalade_apps.classify.decoders import decoder_for
    from escalade_apps.classify.images import find, require_any
    from escalade_apps.classify.prediction import predict, warm_up

    console, status = Console(), Console(stderr=True)
    if weights is not None and network is not None:
        raise UnsupportedError(
            "pass --weights (for a ResNet) or --network (which has its own weights), not both"
        )
    if weights is None and network is None:
        raise UnsupportedError(
            "classify needs --weights FILE, a .safetensors, .pth or .pt file of a ResNet with torchvision's or timm's "
            "parameter names. Escalade includes none; to make one: torch.save(torchvision.models.resnet18("
            "weights='DEFAULT').state_dict(), 'resnet18.pth'). Or pass --network: a constructor, a program or a saved "
            "engine"
        )
    if dtype is not None:
        require_dtype(dtype)

    request = ClassifierRequest(weights, network, labels, dtype, mean, std)
    if ray is not None:
        if results is None or json is not None or csv is not None:
            raise UnsupportedError(
                "--ray writes its results to a folder: pass --output FOLDER and --format parquet or csv instead of "
                "--json or --csv"
            )
        from escalade.commands import clusters

        clusters.classify(
            console, status, ray, request, images, results,
            workers=workers, device=device, batch=batch or _DEFAULT_BATCH, top=top, shard=shard, form=form,
        )  # fmt: skip
        return
    if results is not None:
        raise UnsupportedError("--output needs --ray; without it, write results with --json or --csv")
    where = engine_device(device)
    files, unreadable_folders = find([_local_path(image) for image in images])
    require_any(files)
    reading.prestart(files)
    batch = min(batch or (_GPU_BATCH if where == "cuda" else _DEFAULT_BATCH), len(files))
    with status.status(f"Compiling {request.title} for {where}"):
        found = build_classifier(request, where, batch, files)
        decoder = decoder_for(found.engine.device)
        warm_up(found.engine, found.crop, batch, min(top, len(found.labels)))
    skipped: list[Unreadable] = list(unreadable_folders)
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
    _summarize(console, status, len(predictions), skipped, about, len(unreadable_folders))
    if skipped:
        raise typer.Exit(1)


def _local_path(name: str) -> pathlib.Path:
    if "://" in name and not os.path.exists(name):
        raise UnsupportedError(
            f"{printable(name)} is a URI; only --ray reads URIs (pass --ray local to run on this machine)"
        )
    return pathlib.Path(name)


def _show(console: Console, predictions: list[Prediction]) -> None:
    """Print the predictions; on a terminal only the first `_ROWS`."""
    from escalade_apps.classify import output

    first = predictions[:_ROWS] if console.is_terminal else predictions
    if first:
        console.print(output.table(first))
    if len(first) < len(predictions):
        more = len(predictions) - len(first)
        console.print(
            f"and {more:,} more images: write all of them with --csv FILE or --json FILE",
            highlight=False,
            style="dim",
        )


def _summarize(
    console: Console,
    status: Console,
    read: int,
    skipped: list[Unreadable],
    about: dict[str, Any],
    folders: int,
) -> None:
    seconds = about["seconds"]
    console.print(
        f"{read:,} images in {seconds:.2f} s, {read / max(seconds, 1e-9):,.0f} per second including decoding: "
        f"{about['network']}, {about['dtype']}, batch size {about['batch']}, on {about['device']}, decoded by "
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
