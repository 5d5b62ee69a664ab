"""The generated part of README.md, which the HTML page opens with: one table and two plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from escalade.version import VERSION
from escalade_bench.measure.records import Record
from escalade_bench.peers.comparison import COVERAGE, TRAINING_STEP, on_device
from escalade_bench.report import cells, compare, plots
from escalade_bench.report.compare import Compared, compared
from escalade_bench.report.document import Bar, Item, Plot
from escalade_bench.report.pages import coverage, ladders
from escalade_bench.report.table import Column, Table, columns, text

MOST_ROWS = 12
_TORCHVISION = COVERAGE + "torchvision"
_DTYPES = ("fp16", "bf16", "tf32", "fp32")
Row = tuple[str, Compared]
"""A row's title and its comparison."""


def _network(name: str, batch: int) -> list[tuple[str, str]]:
    return [(name, f"224_b{batch}"), (_TORCHVISION, f"{name}_224_b{batch}")]


def _step(name: str, size: int) -> list[tuple[str, str]]:
    return [(name + TRAINING_STEP, f"{size}_b{batch}") for batch in (64, 256, 32, 1024)]


WANTED = (
    ("ResNet-18", _network("resnet18", 1)),
    ("ResNet-18", _network("resnet18", 32)),
    ("ResNet-18", _network("resnet18", 256)),
    ("ResNet-50", _network("resnet50", 256)),
    ("ConvNeXt-T", _network("convnext_tiny", 32)),
    ("EfficientNet-B0", _network("efficientnet_b0", 32)),
    ("MobileNetV2", _network("mobilenet_v2", 32)),
    ("autoencoder, training step", _step("autoencoder", 32)),
    ("ResNet-50, training step", _step("resnet50", 224)),
    ("MobileNetV2, training step", _step("mobilenet_v2", 224)),
    ("LeNet", [("lenet", "86_b10000")]),
    ("spectral autoencoder", [("spectral_autoencoder", "320_b512")]),
    ("ResNet-50", _network("resnet50", 32)),
)
"""Titles, each with workloads and problems; the first one with a record is shown, up to `MOST_ROWS`."""


def rows(records: Sequence[Record]) -> list[Row]:
    """Rows that have a record, each in the first dtype with a ratio."""
    every = [one for one in compared(records) if on_device(one.ours) and one.ours.dtype in _DTYPES]
    every.sort(key=lambda one: (one.device.ratio is None, _DTYPES.index(one.ours.dtype)))
    found: list[Row] = []
    for title, problems in WANTED:
        own = [one for wanted in problems for one in every if (one.ours.workload, one.ours.problem) == wanted]
        found += [(title, own[0])] if own else []
    titles = [title for title, _ in WANTED]
    return sorted(found[:MOST_ROWS], key=lambda row: (titles.index(row[0]), row[1].ours.batch))


def table(shown: Sequence[Row]) -> Table:
    ours, *_, best, over = compare.times([one for _, one in shown], on_device)
    inner = [
        *columns("dtype|batch", compare.ours),
        replace(ours, heading="Escalade, µs"),
        Column("best peer, µs", lambda c: cells.microseconds(c.device.peer)),
        *(best, over, compare.note(on_device)),
    ]
    outer = [replace(c, cell=lambda row, c=c: c.cell(row[1])) for c in inner]  # type: ignore[misc]
    return Table([text("network", lambda row: row[0]), *outer], shown, lambda row: row[1].records)


def state(shown: Sequence[Row]) -> str:
    """The version, the hardware and the days of the figures, in two sentences."""
    own = [one.ours for _, one in shown]
    days = sorted(r.date[:10] for r in own)
    torch = sorted({r.versions.get("torch", "").partition("+")[0] for r in own})
    when = f"on {days[0]}" if days[0] == days[-1] else f"from {days[0]} to {days[-1]}"
    return (
        f"Version {VERSION}, tested on an {own[0].gpu} with driver {own[0].driver} and PyTorch {', '.join(torch)}. The "
        f"figures are medians of device time, measured {when}: above 1× Escalade is faster than the best peer, and "
        "each row gives its commit and day."
    )


def speedup_plot(records: Sequence[Record], shown: Sequence[Row]) -> list[Plot]:
    """Every network of inference at batch 32 in fp16, and those of the table, beside its best peer."""
    ratios: dict[str, float] = {}
    wrong: list[str] = []
    for part in coverage.parts(records):
        if (part.workload, part.dtype, part.batch) == (_TORCHVISION, "fp16", 32):
            ratios.update(part.ratios())
            wrong += [coverage.network(row) for row in part.rows if row.ours.failure]
    for _, one in shown:
        name = one.ours.workload + (f" b{one.ours.batch:,}" if one.ours.batch != 32 else "")
        if one.device.ratio and not name.startswith(COVERAGE) and TRAINING_STEP not in name:
            ratios[name] = one.device.ratio
    title = "Speed relative to the best peer, per network (batch 32 where none is named)"
    bars = [
        *(
            Bar(name, ratio, f"{ratio:.1f}×", "green" if ratio >= 1 else "red")
            for name, ratio in sorted(ratios.items(), key=lambda pair: -pair[1])
        ),
        *(Bar(name, 0.0, "not right") for name in wrong),
    ]
    draw = partial(plots.speedups, ratios, title, wrong)
    return [Plot("speedups", title, draw, bars=bars)] if bars else []


def block(records: Sequence[Record]) -> list[Item]:
    """Nothing until there are records."""
    shown = rows(records)
    made: list[Item] = [state(shown), table(shown)] if shown else []
    made += speedup_plot(records, shown)
    return [*made, ladders.climb_plot(records)] if ladders.climb(records) else made
