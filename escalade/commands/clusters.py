"""Image files through a network on a cluster of Ray's, as `escalade classify --ray` has them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.progress import TimeRemainingColumn

from escalade.commands.classifiers import Asked, classifier
from escalade.commands.networks import is_saved
from escalade.commands.progress import progress_bar
from escalade.errors import UnsupportedError
from escalade.terminal_text import printable
from escalade_apps.ray import Job, Network
from escalade_apps.ray.connection import connected


def classify(
    console: Console,
    status: Console,
    address: str,
    asked: Asked,
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
    """Runs what is left of the job, and says what was done. Fails if an image of it could not be read."""
    if asked.dtype == "fp8":
        raise UnsupportedError(
            "with --ray, fp8 is for engines that were saved in it: compile(..., calibration=...).save(FILE), and "
            "--network FILE"
        )
    with status.status(f"Compiling {asked.called}"):
        found = classifier(asked, "cpu", batch, ())
        network = Network.of(
            found.engine, found.crop, found.labels, found.title, str(asked.weights or asked.network),
            saved=asked.network is not None and is_saved(asked.network),
        )  # fmt: skip
    with status.status(f"Looking for images, and for Ray at {printable(address)}"):
        job = Job(
            images, output, network,
            workers=workers, device=device, batch=batch, top=top, shard=shard, form=form,
        )  # fmt: skip
        entered = contextlib.ExitStack()
        entered.enter_context(connected(address))
    done = unreadable = 0
    start = time.perf_counter()
    with entered, progress_bar(status, TimeRemainingColumn()) as progress:
        task = progress.add_task("Classifying", total=job.images, completed=job.images - job.images_left)
        for part in job.run():
            done += part.images
            unreadable += part.unreadable
            progress.advance(task, part.images)
    seconds = time.perf_counter() - start
    console.print(
        f"{done:,} images in {seconds:.2f} s, {done / max(seconds, 1e-9):,.0f} a second, decoding and the start of "
        f"workers included; {job.images - done:,} were done before: {network.title}, {network.dtype}, batches of "
        f"{batch}, to {printable(output)}",
        highlight=False,
    )
    for each in job.closed:
        status.print(f"skipped {printable(each.file)}: {printable(each.reason)}", style="red", markup=False)
    if unreadable:
        status.print(
            f"[red]{unreadable:,} of {done:,} images could not be read[/]; their rows say why",
            highlight=False,
        )
    if unreadable or job.closed:
        raise typer.Exit(1)
