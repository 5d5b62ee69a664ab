"""Train with a progress bar and signals, for `escalade train`."""

from __future__ import annotations

import math
import pathlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import TextColumn, TimeRemainingColumn

from escalade.commands.progress import progress_bar
from escalade.models import ConvAutoencoder
from escalade.terminal_text import counted
from escalade_apps.train.logs import Progress
from escalade_apps.train.parallel import LostError, Processes
from escalade_apps.train.probing import Probe, ProbeResult
from escalade_apps.train.trainer import Evaluation, Trainer

RUNS = pathlib.Path("runs")


class _StopFlag:
    """Callable flag that a signal handler sets to the number of its signal."""

    def __init__(self) -> None:
        self.signal = 0

    def __call__(self) -> bool:
        return bool(self.signal)


def announce(console: Console, run: Trainer, own: Processes, folder: pathlib.Path, resume: bool) -> None:
    settings, count = run.settings, sum(each.numel() for each in run.model.parameters())
    ranks = f", {own.count} processes" if own.count > 1 else ""
    console.print(
        f"{settings.task}, {counted(count, 'parameter')}, on {counted(len(run.dataset.train), 'image')} of "
        f"{run.dataset.name}: "
        f"{counted(run.total, 'step')} of {settings.batch} in {settings.dtype} on {own.device}{ranks}",
        highlight=False,
    )
    if run.step:
        console.print(f"Resuming after step {run.step:,} from the checkpoint in {folder}", highlight=False)
    elif resume:
        console.print(f"No checkpoint in {folder}: starting over", highlight=False)


def train(console: Console, run: Trainer, own: Processes) -> int:
    """Run to the end, or until a signal arrives; return the signal's number, or 0."""
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
    return stop.signal


def fit_classifier(console: Console, run: Trainer, probe: Probe, device: str) -> ProbeResult:
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
        if stop():
            raise KeyboardInterrupt
        stop.signal = number

    handled = [each for each in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(each) != signal.SIG_IGN]
    previous = {each: signal.signal(each, handle) for each in handled}
    try:
        yield stop
    finally:
        for each, handler in previous.items():
            signal.signal(each, handler)
