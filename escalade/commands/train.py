"""The command `train`: a network over epochs of images."""

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
from escalade.commands.options import LARGEST_SIDE, EngineOn, count, seed_option, written
from escalade.commands.progress import progress_bar
from escalade.errors import UnsupportedError
from escalade.models import ConvAutoencoder
from escalade_apps.train.parallel import LostError, Processes, processes
from escalade_apps.train.probing import Judgement, Probe
from escalade_apps.train.progress import Progress
from escalade_apps.train.runs import trainer
from escalade_apps.train.trainer import BEST, Evaluation, Trainer
from escalade_bench.learning import learning_record
from escalade_bench.measure import records

RUNS = pathlib.Path("runs")


class _Stop:
    """Whether somebody wants the run to end."""

    def __init__(self) -> None:
        self.wanted = False

    def __call__(self) -> bool:
        return self.wanted


def command(
    task: Annotated[str, typer.Argument(help="autoencoder or resnet18.", show_default=False)],
    data: Annotated[
        str | None,
        typer.Option(
            help="CIFAR-10 (binary or Python version, unpacked), IDX files, a folder of images, an .npz file, or "
            "synthetic[:COUNT]. Without it: synthetic.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        pathlib.Path | None,
        written(
            "--output",
            "-o",
            help="The run's folder. Without it: runs/TASK.",
            check=files.require_writable_folder,
            show_default=False,
        ),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in that folder.")] = False,
    epochs: Annotated[int | None, count("--epochs", help="How often to see every image.")] = None,
    steps: Annotated[int | None, count("--steps", help="End after so many steps.")] = None,
    batch: Annotated[
        int | None, count("--batch", "-b", help="Images a step, of all processes together.")
    ] = None,
    lr: Annotated[float | None, typer.Option(help="The learning rate.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd (momentum 0.9), adam or adamw.")] = None,
    schedule: Annotated[str | None, typer.Option(help="constant, or cosine: up and down to 0.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="The optimiser's.")] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            "-t",
            help="fp32, tf32, or fp16 and bf16 mixed with fp32. Without it: fp16 on a GPU, else fp32.",
        ),
    ] = None,
    seed: Annotated[int | None, seed_option("Of the weights, the order and the augmentation.")] = None,
    device: EngineOn = None,
    width: Annotated[
        int | None, count("--width", help="Channels of the network's first convolution.")
    ] = None,
    side: Annotated[
        int | None,
        count("--side", help="Size of images from folders, and of synthetic ones.", most=LARGEST_SIDE),
    ] = None,
    flip: Annotated[bool | None, typer.Option(help="Whether to mirror images at random.")] = None,
    shift: Annotated[
        int | None, count("--shift", help="By how many pixels to shift images at random.", least=0)
    ] = None,
    held_out: Annotated[
        float | None, typer.Option(help="The part to test by, of images that come without one.")
    ] = None,
    patience: Annotated[
        int | None, count("--patience", help="End after so many epochs without a better evaluation.")
    ] = None,
    every: Annotated[
        int | None, count("--every", help="Steps between checkpoints, beside one after each epoch.")
    ] = None,
    weights: Annotated[
        pathlib.Path | None, typer.Option("--weights", "-w", help="What the network begins with.")
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Log for TensorBoard too.")] = False,
    classifier: Annotated[
        bool,
        typer.Option("--classifier", help="Then fit a linear classifier to the autoencoder's features."),
    ] = False,
    results: Annotated[
        pathlib.Path | None,
        written(
            "--results",
            check=files.require_writable_folder,
            help="File the course of the run under this folder, in one of the GPU's name, for the report.",
        ),
    ] = None,
) -> None:
    """Train a network: the autoencoder or a ResNet-18, with checkpoints that a run goes on from bit for bit."""
    options: dict[str, Any] = {
        "data": data, "epochs": epochs, "steps": steps, "batch": batch, "lr": lr, "optimizer": optimizer,
        "schedule": schedule, "weight_decay": weight_decay, "dtype": dtype, "seed": seed, "width": width, "side": side,
        "flip": flip, "shift": shift, "held_out": held_out, "patience": patience, "every": every,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    folder = output or RUNS / task
    if classifier and task != "autoencoder":
        raise UnsupportedError(
            f"--classifier is for the features of the autoencoder; {task} is a classifier itself"
        )
    where = engine_device(device)
    twin = where == "twin"
    if results is not None and where == "cpu":
        raise UnsupportedError(
            "--results files what Escalade's kernels have learned: it takes --device cuda or twin; the course of this "
            "run is in its folder"
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
        console.print(f"All of it is in {folder}: {best}the course in log.jsonl and loss.png")
        judgement = _classify(console, run, probe, where) if probe is not None and own.first else None
        if results is not None and own.first:
            record = learning_record(run.settings, run.dataset, folder, seconds, judgement)
            for path in records.file_away(results, [record.stamped(records.provenance(own.device))]):
                console.print(f"wrote {escape(str(path))}")


def _announce(console: Console, run: Trainer, own: Processes, folder: pathlib.Path, resume: bool) -> None:
    settings, count = run.settings, sum(each.numel() for each in run.model.parameters())
    together = f", {own.count} processes" if own.count > 1 else ""
    console.print(
        f"{settings.task}, {count:,} parameters, on {len(run.dataset.train):,} images of {run.dataset.name}: "
        f"{run.total:,} steps of {settings.batch} in {settings.dtype} on {own.device}{together}",
        highlight=False,
    )
    if run.step:
        console.print(f"Going on behind step {run.step:,}, from the checkpoint in {folder}", highlight=False)
    elif resume:
        console.print(f"No checkpoint was kept in {folder}: the run begins anew", highlight=False)


def _train(console: Console, run: Trainer, own: Processes) -> None:
    columns = TextColumn("loss {task.fields[loss]}, {task.fields[speed]} images/s"), TimeRemainingColumn()
    with _signals(own) as stop, progress_bar(console, *columns, disable=not console.is_terminal) as bar:
        shown = bar.add_task("Training", total=run.total, completed=run.step, loss="-", speed="-")

        def watch(news: Progress | Evaluation) -> None:
            if isinstance(news, Progress):
                speed = f"{news.images_per_second:,.0f}"
                bar.update(shown, completed=news.step, loss=f"{news.loss:.5f}", speed=speed)
                return
            right = "" if news.accuracy is None else f", {news.accuracy:.2%} right"
            best = ", the best so far" if news.best else ""
            bar.console.print(
                f"epoch {news.epoch}, step {news.step:,}: test loss {news.loss:.6f}{right}{best}",
                highlight=False,
            )

        outcome = run.run(watch, stop)
    best = f"; the best test loss is {outcome.best:.6f}" if math.isfinite(outcome.best) else ""
    console.print(
        f"Ended: {outcome.why}{best}"
        + ("" if outcome.step >= outcome.total else ". --resume goes on with it"),
        highlight=False,
    )


def _classify(console: Console, run: Trainer, probe: Probe, device: str) -> Judgement:
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
        f"A linear classifier on the encoder's {found.features:,} features is right on {found.train:.2%} of the "
        f"images it was fitted to and on {found.test:.2%} of the others",
        highlight=False,
    )
    return found


@contextmanager
def _signals(own: Processes) -> Iterator[_Stop]:
    """Ctrl-C and a request to end let a step be finished and kept; a second one does not wait.

    One of several processes ends at once: the others may be at another step. A Ctrl-C that is ignored, as in what a
    shell starts in the background, stays ignored.
    """
    stop = _Stop()

    def asked(number: int, frame: Any) -> None:
        if own.count > 1:
            raise LostError(
                f"process {own.rank} of {own.count} was told to end, as one is when another has failed. "
                "--resume goes on from the last checkpoint"
            )
        if stop.wanted:
            raise KeyboardInterrupt
        stop.wanted = True

    heard = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) != signal.SIG_IGN]
    before = {each: signal.signal(each, asked) for each in heard}
    try:
        yield stop
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
