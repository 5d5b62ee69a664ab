"""`escalade train`: train a network."""

from __future__ import annotations

import math
import pathlib
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import TextColumn, TimeRemainingColumn

from escalade import files
from escalade.commands.devices import engine_device
from escalade.commands.options import MAX_SIDE, EngineOn, count, seed_option, written
from escalade.commands.progress import progress_bar
from escalade.errors import UnsupportedError
from escalade.models import ConvAutoencoder
from escalade_apps.train.parallel import LostError, Processes, processes
from escalade_apps.train.probing import Probe, ProbeResult
from escalade_apps.train.progress import Progress
from escalade_apps.train.runs import trainer
from escalade_apps.train.trainer import BEST, Evaluation, Trainer
from escalade_bench.learning import learning_record
from escalade_bench.measure import records

RUNS = pathlib.Path("runs")


class _StopFlag:
    """Callable flag that a signal handler sets."""

    def __init__(self) -> None:
        self.is_set = False

    def __call__(self) -> bool:
        return self.is_set


def command(
    task: Annotated[str, typer.Argument(help="autoencoder or resnet18.", show_default=False)],
    data: Annotated[
        str | None,
        typer.Option(
            help="CIFAR-10 (binary or Python version, unpacked), IDX files, a folder of images, an .npz file, or "
            "synthetic[:COUNT]. Default: synthetic.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        pathlib.Path | None,
        written(
            "--output",
            "-o",
            help="Folder of the run. Default: runs/TASK.",
            check=files.require_writable_folder,
            show_default=False,
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the run in that folder.")] = False,
    epochs: Annotated[int | None, count("--epochs", help="Passes over the training images.")] = None,
    steps: Annotated[int | None, count("--steps", help="Stop after this many steps.")] = None,
    batch: Annotated[int | None, count("--batch", "-b", help="Batch size over all processes.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd (momentum 0.9), adam or adamw.")] = None,
    schedule: Annotated[str | None, typer.Option(help="constant, or cosine with a linear warmup.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="Weight decay of the optimizer.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            "-t",
            help="fp32, tf32, or mixed precision with fp16 or bf16. Default: fp16 on a GPU, else fp32.",
        ),
    ] = None,
    seed: Annotated[int | None, seed_option("Seed for weights, shuffling and augmentation.")] = None,
    device: EngineOn = None,
    width: Annotated[int | None, count("--width", help="Channels of the first convolution.")] = None,
    side: Annotated[
        int | None,
        count("--side", help="Size of images from folders and of synthetic images.", most=MAX_SIDE),
    ] = None,
    flip: Annotated[bool | None, typer.Option(help="Randomly mirror images.")] = None,
    shift: Annotated[
        int | None, count("--shift", help="Randomly shift images by up to this many pixels.", least=0)
    ] = None,
    held_out: Annotated[
        float | None, typer.Option(help="Fraction held out for testing, of datasets without test images.")
    ] = None,
    patience: Annotated[
        int | None, count("--patience", help="Stop after this many epochs without a better evaluation.")
    ] = None,
    every: Annotated[
        int | None, count("--every", help="Steps between checkpoints, in addition to one per epoch.")
    ] = None,
    weights: Annotated[
        pathlib.Path | None, typer.Option("--weights", "-w", help="File of initial weights.")
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Also log to TensorBoard.")] = False,
    classifier: Annotated[
        bool,
        typer.Option(
            "--classifier", help="After training, fit a linear classifier to the autoencoder's features."
        ),
    ] = False,
    results: Annotated[
        pathlib.Path | None,
        written(
            "--results",
            check=files.require_writable_folder,
            help="File the loss curve of the run in this folder, under the name of the GPU, for the report.",
        ),
    ] = None,
) -> None:
    """Train the autoencoder or a ResNet-18, with checkpoints that resume bit for bit."""
    options: dict[str, Any] = {
        "data": data, "epochs": epochs, "steps": steps, "batch": batch, "lr": lr, "optimizer": optimizer,
        "schedule": schedule, "weight_decay": weight_decay, "dtype": dtype, "seed": seed, "width": width, "side": side,
        "flip": flip, "shift": shift, "held_out": held_out, "patience": patience, "every": every,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    folder = output or RUNS / task
    if classifier and task != "autoencoder":
        raise UnsupportedError(f"--classifier needs the autoencoder; {task} is itself a classifier")
    where = engine_device(device)
    twin = where == "twin"
    if results is not None and where == "cpu":
        raise UnsupportedError(
            "--results records runs of Escalade's kernels, so it needs --device cuda or twin; the log of this run is "
            "in its folder"
        )
    with processes(torch.device("cpu" if twin else where)) as own:
        console = Console(quiet=not own.first)
        with console.status("Reading the images and planning the step"):
            run = trainer(
                task, given, folder, own, resume=resume, weights=weights, twin=twin, tensorboard=tensorboard
            )
        probe = Probe(run.dataset, run.settings.seed) if classifier else None
        _announce(console, run, own, folder, resume)
        began, first = time.monotonic(), run.step
        _train(console, run, own)
        seconds = None if first else time.monotonic() - began
        best = f"the weights in {BEST}, " if (folder / BEST).is_file() else ""
        console.print(f"Wrote {folder}: {best}the log in log.jsonl, the curve in loss.png")
        judgement = _classify(console, run, probe, where) if probe is not None and own.first else None
        if results is not None and own.first:
            record = learning_record(run.settings, run.dataset, folder, seconds, judgement)
            for path in records.file_away(results, [record.stamped(records.provenance(own.device))]):
                console.print(f"wrote {escape(str(path))}")


def _announce(console: Console, run: Trainer, own: Processes, folder: pathlib.Path, resume: bool) -> None:
    settings, count = run.settings, sum(each.numel() for each in run.model.parameters())
    ranks = f", {own.count} processes" if own.count > 1 else ""
    console.print(
        f"{settings.task}, {count:,} parameters, on {len(run.dataset.train):,} images of {run.dataset.name}: "
        f"{run.total:,} steps of {settings.batch} in {settings.dtype} on {own.device}{ranks}",
        highlight=False,
    )
    if run.step:
        console.print(f"Resuming after step {run.step:,} from the checkpoint in {folder}", highlight=False)
    elif resume:
        console.print(f"No checkpoint in {folder}: starting over", highlight=False)


def _train(console: Console, run: Trainer, own: Processes) -> None:
    columns = TextColumn("loss {task.fields[loss]}, {task.fields[speed]} images/s"), TimeRemainingColumn()
    with _signals(own) as stop, progress_bar(console, *columns, disable=not console.is_terminal) as bar:
        task = bar.add_task("Training", total=run.total, completed=run.step, loss="-", speed="-")

        def watch(event: Progress | Evaluation) -> None:
            if isinstance(event, Progress):
                speed = f"{event.images_per_second:,.0f}"
                bar.update(task, completed=event.step, loss=f"{event.loss:.5f}", speed=speed)
                return
            accuracy = "" if event.accuracy is None else f", accuracy {event.accuracy:.2%}"
            best = ", best so far" if event.best else ""
            bar.console.print(
                f"epoch {event.epoch}, step {event.step:,}: test loss {event.loss:.6f}{accuracy}{best}",
                highlight=False,
            )

        outcome = run.run(watch, stop)
    best = f"; best test loss {outcome.best:.6f}" if math.isfinite(outcome.best) else ""
    console.print(
        f"Ended: {outcome.reason}{best}"
        + ("" if outcome.step >= outcome.total else ". Continue with --resume"),
        highlight=False,
    )


def _classify(console: Console, run: Trainer, probe: Probe, device: str) -> ProbeResult:
    assert isinstance(run.model, ConvAutoencoder)
    with console.status("Fitting a linear classifier to the encoder's features"):
        found = probe.fit(
            run.model,
            run.normalization,
            batch=run.settings.batch,
            dtype=run.settings.dtype,
            device=device,
        )
    console.print(
        f"Linear classifier on the encoder's {found.features:,} features: accuracy {found.train:.2%} on training "
        f"images, {found.test:.2%} on test images",
        highlight=False,
    )
    return found


@contextmanager
def _signals(own: Processes) -> Iterator[_StopFlag]:
    """On SIGINT or SIGTERM, finish the step and save a checkpoint; on a second one, exit at once.

    One of several processes exits immediately, because the others may be at another step. Signals that are ignored, as
    SIGINT in a shell's background jobs, stay ignored.
    """
    stop = _StopFlag()

    def handle(number: int, frame: Any) -> None:
        if own.count > 1:
            raise LostError(
                f"process {own.rank} of {own.count} was terminated, probably because another one failed. Resume from "
                "the last checkpoint with --resume"
            )
        if stop.is_set:
            raise KeyboardInterrupt
        stop.is_set = True

    handled = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) != signal.SIG_IGN]
    previous = {each: signal.signal(each, handle) for each in handled}
    try:
        yield stop
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
