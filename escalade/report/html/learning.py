"""Runs of training as pictures: the loss by step, and what an autoencoder makes of images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from escalade.bench.networks.learning import SUFFIX
from escalade.measure.records import Record
from escalade.report.html.bars import WIDTH, legend_above
from escalade.report.html.section import Picture
from escalade.report.html.svg import BLUE, RED, inline
from escalade.report.markdown import table

_COMMAND = "escalade train autoencoder --data cifar-10-batches-bin --epochs 20 --results results"


def runs(records: Sequence[Record]) -> list[Record]:
    """The runs that have a course."""
    return [r for r in records if r.workload.endswith(SUFFIX) and r.config.get("losses")]


def text(records: Sequence[Record]) -> str:
    """A row for each run; without any, how to make one."""
    found = runs(records)
    if not found:
        return f"No run of training is recorded yet: `{_COMMAND}`.\n"
    header = (
        "network", "images", "dtype", "on", "commit", "optimiser", "batch", "steps", "first loss", "last loss",
        "best test loss", "right of test images",
    )  # fmt: skip
    return table(header, map(_cells, found), left=6)


def _cells(r: Record) -> tuple[str, ...]:
    said, losses = r.config, r.config["losses"]
    best = min((loss for _, loss, _ in said["evaluations"]), default=None)
    return (
        _network(r), f"{said['images']:,} of {r.problem.rpartition('_')[0]}", r.dtype, r.gpu, r.commit,
        f"{said['optimizer']}, {said['lr']:g}, {said['schedule']}", f"{r.batch:,}", f"{losses[-1][0]:,}",
        f"{losses[0][1]:.4g}", f"{losses[-1][1]:.4g}", "" if best is None else f"{best:.4g}",
        "" if r.accuracy is None else f"{100 * r.accuracy:.2f}%",
    )  # fmt: skip


def _network(record: Record) -> str:
    return record.workload.removesuffix(SUFFIX)


def pictures(records: Sequence[Record]) -> Iterator[Picture]:
    """The curve of each run, and the images that were made."""
    for number, run in enumerate(runs(records)):
        title = f"{_network(run)} learns {run.problem.rpartition('_')[0]} in {run.dtype}, on {run.gpu}"
        yield Picture(
            title,
            inline(partial(curve_figure, run), f"learning-{number}", title),
            "The loss of each step, in the mean of short stretches, and that of the test images after each epoch.",
        )
        if run.config["reconstructions"]:
            label = f"Test images, and below them what {_network(run)} makes of them"
            source = f"data:image/png;base64,{run.config['reconstructions']}"
            yield Picture(
                label,
                Markup('<img class="sheet" src="{}" alt="{}">').format(source, label),
                "After the last epoch.",
            )


def curve_figure(run: Record) -> Figure:
    """The loss on a logarithmic axis."""
    figure = Figure(figsize=(WIDTH, 3.0))
    axes = figure.add_axes((0.11, 0.15, 0.86, 0.74))
    axes.plot(
        *zip(*run.config["losses"], strict=True), color=BLUE, linewidth=1.2, label="training", gid="losses"
    )
    judged = [(step, loss) for step, loss, _ in run.config["evaluations"]]
    if judged:
        axes.plot(
            *zip(*judged, strict=True), color=RED, marker="o", markersize=3.5, linewidth=0, label="test images",
            gid="evaluations",
        )  # fmt: skip
    if all(loss > 0 and math.isfinite(loss) for _, loss in (*run.config["losses"], *judged)):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{loss:g}"))
    axes.grid(axis="y")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    legend_above(figure)
    return figure
