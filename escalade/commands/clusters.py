"""`escalade classify --ray`: classify image files on a Ray cluster."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.progress import TimeRemainingColumn

from escalade.commands.classifiers import ClassifierRequest, build_classifier
from escalade.commands.networks import is_saved
from escalade.commands.progress import progress_bar
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import QUANTIZED
from escalade.terminal_text import printable
from escalade_apps.ray import Job, Network
from escalade_apps.ray.jobs import connected


def classify(
    console: Console,
    status: Console,
    address: str,
    request: ClassifierRequest,
    images: Sequence[str],
    output: str,
    *,
    workers: int | None,
    device: str | None,
    batch: int,
    top: int,
    shard: int,
    form: str,
) -> None:
    """Run the unfinished shards of the job. Exits with status 1 if an image could not be read."""
    if request.dtype in QUANTIZED:
        raise UnsupportedError(
            f"--ray with --dtype {request.dtype} needs a saved {request.dtype} engine: compile(..., "
            "calibration=...).save(FILE), then pass --network FILE"
        )
    with status.status(f"Compiling {request.title}"):
        found = build_classifier(request, "cpu", batch, ())
        network = Network.of(
            found.engine, found.crop, found.labels, found.title, str(request.weights or request.network),
            saved=request.network is not None and is_saved(request.network),
        )  # fmt: skip
    with status.status(f"Finding images and connecting to Ray at {printable(address)}"):
        job = Job(
            images, output, network,
            workers=workers, device=device, batch=batch, top=top, shard=shard, form=form,
        )  # fmt: skip
        connection = contextlib.ExitStack()
        connection.enter_context(connected(address))
    done = unreadable = 0
    start = time.perf_counter()
    with connection, progress_bar(status, TimeRemainingColumn()) as progress:
        task = progress.add_task("Classifying", total=job.images, completed=job.images - job.images_left)
        for part in job.run():
            done += part.images
            unreadable += part.unreadable
            progress.advance(task, part.images)
    seconds = time.perf_counter() - start
    console.print(
        f"{done:,} images in {seconds:.2f} s, {done / max(seconds, 1e-9):,.0f} per second including decoding and "
        f"worker startup; {job.images - done:,} were already done: {network.title}, {network.dtype}, batch size "
        f"{batch}, written to {printable(output)}",
        highlight=False,
    )
    for each in job.closed:
        status.print(f"skipped {printable(each.file)}: {printable(each.reason)}", style="red", markup=False)
    if unreadable:
        status.print(
            f"[red]{unreadable:,} of {done:,} images could not be read[/]; the reasons are in the results",
            highlight=False,
        )
    if unreadable or job.closed:
        raise typer.Exit(1)
