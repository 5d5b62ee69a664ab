"""All records as one self-contained HTML file: README's table and plots, then every page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from escalade.ops import OPERATIONS
from escalade_bench.learning import SUFFIX as LEARNING
from escalade_bench.measure.records import Record
from escalade_bench.peers.comparison import TRAINING_STEP
from escalade_bench.report import cells, plots, terminal
from escalade_bench.report.changes import Changes
from escalade_bench.report.compare import Cards, Verdict, grouped, of, summary
from escalade_bench.report.document import OLDER_LEGEND, Heading, Item, Plot, html, prose
from escalade_bench.report.pages import (
    coverage,
    goals,
    ladders,
    layers,
    networks,
    readme,
    records,
    training,
)
from escalade_bench.report.table import Column, Table, columns, items, text
from escalade_bench.report.tables import on_cards

Section = tuple[str, str, Iterable[Item], int]
"""A section: anchor, title, items, and the level of collapsed headings."""

_OPEN = ("overview", "changes")
"""Sections that are not collapsed."""


def report(found: Mapping[str, Sequence[Record]], since: Changes | None = None) -> str:
    """The whole file."""
    everything = [record for own in found.values() for record in own]
    environment = Environment(
        loader=PackageLoader("escalade_bench.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    return environment.get_template("report.html").render(
        sections=[
            (key, title, html(made, fold, key), key not in _OPEN)
            for key, title, made, fold in sections(found, since)
        ],
        cards=", ".join(sorted({record.gpu for record in everything})),
        figures=len(everything),
        day=max(record.date for record in everything)[:10],
        older=prose(OLDER_LEGEND, inline=True) if any(record.older for record in everything) else "",
    )


def sections(found: Mapping[str, Sequence[Record]], since: Changes | None) -> Iterator[Section]:
    """Yield all sections; pages of the docs without title and the paragraph on how they are generated."""
    everything = [record for own in found.values() for record in own]
    cards = on_cards(found)
    opening = [
        item
        for own in cards.values()
        for item in (*readme.block(own), *summary(verdicts(own), f"All comparisons on {own[0].gpu}", 2))
    ]
    yield "overview", "At a glance", opening or ["Nothing was measured on a card yet: `escalade measure`."], 0
    if since is not None:
        yield "changes", "Slower and faster than before", since.items(), 0
    yield "networks", "Networks", networks.page(cards)[2:], 3
    yield "training", "Training steps", [item for own in cards.values() for item in _training(own)], 3
    yield "coverage", "Coverage: every network of a module", coverage.page(cards)[2:], 3
    yield "layers", "Single layers", layers.page(cards)[2:], 4
    yield "ladders", "Ladders", [*ladders.overview(cards)[2:], *_ladders(cards, everything)], 3
    yield "steps", "ResNet-18, step by step", training.step_page(cards)[2:], 0
    yield (
        "goals",
        "Goals: predicted and measured",
        [i for own in cards.values() for i in goals.page(own)[2:]],
        2,
    )
    yield "learning", "Training curves", _learning(everything), 0
    yield "records", "Tests, long runs, peers, gaps", records.page(everything)[2:], 0
    yield "provenance", "Where each figure comes from", _provenance(everything), 0


def _training(own: Sequence[Record]) -> list[Item]:
    further = [Heading(3, "Techniques"), *training.techniques(own), Heading(3, "Pairs"), *training.pairs(own)]
    return [Heading(2, own[0].gpu), *training.steps(own), *further]


def verdicts(own: Sequence[Record]) -> list[Verdict]:
    """All sets of comparisons that were measured."""
    found = [
        Verdict.of(title, networks.by_name(own, suffix))
        for title, suffix in (("networks", ""), ("training steps", TRAINING_STEP))
    ]
    return [one for one in (*found, *coverage.verdicts(own), *layers.verdicts(own)) if one.names]


def _ladders(cards: Cards, everything: Sequence[Record]) -> Iterator[Item]:
    """Yield per operation the counters of its rungs, and all rungs on all problems."""
    for name in OPERATIONS:
        counted = [
            table.titled(table.title, 3)
            for table in terminal.count_tables(of(everything, name + terminal.COUNTS))
        ]
        made = [item for own in cards.values() for item in ladders.operation_section(name, own)]
        yield from [Heading(2, name), *counted, *made[1:]] if counted or made else ()


def _learning(everything: Sequence[Record]) -> Iterator[Item]:
    """Yield the recorded training runs, with their curves and reconstructions."""
    runs = [r for r in everything if r.workload.endswith(LEARNING) and r.config.get("losses")]
    if not runs:
        yield "No training run is recorded yet: `escalade train autoencoder --data FOLDER --results results`."
        return

    def best(r: Record) -> str:
        return cells.written("{:.4g}", min((loss for _, loss, _ in r.config["evaluations"]), default=None))

    shown = [
        *columns("workload|data=problem|dtype|batch"),
        Column("images", lambda r: f"{r.config['images']:,}"),
        text("optimizer", lambda r: f"{r.config['optimizer']}, {r.config['lr']:g}, {r.config['schedule']}"),
        Column("steps", lambda r: f"{r.config['losses'][-1][0]:,}"),
        Column("first loss", lambda r: f"{r.config['losses'][0][1]:.4g}"),
        Column("last loss", lambda r: f"{r.config['losses'][-1][1]:.4g}"),
        Column("best test loss", best),
        Column("seconds per epoch", lambda r: cells.written("{:.3g}", r.config.get("seconds_per_epoch"))),
        Column("right of test images", lambda r: cells.written("{:.2%}", r.accuracy)),
    ]
    yield Table(shown, runs)
    for number, run in enumerate(runs):
        what = f"{run.workload.removesuffix(LEARNING)} learns {run.problem} in {run.dtype}, on {run.gpu}"
        yield Plot(f"learning-{number}", what, partial(plots.learning, run))
        if drawn := run.config["reconstructions"]:
            label = "Test images, and below them what the network makes of them after the last epoch"
            image = '<figure><figcaption>{0}</figcaption><img class="sheet" src="{1}" alt="{0}"></figure>\n'
            yield Markup(image).format(label, f"data:image/png;base64,{drawn}")


def _provenance(everything: Sequence[Record]) -> Iterator[Item]:
    """Yield the machines by number, then a row per workload and run."""

    def machine(r: Record) -> tuple[str, str, str]:
        return r.gpu, r.driver, ", ".join(f"{name} {value}" for name, value in r.versions.items())

    machines = {
        one: str(number) for number, one in enumerate(dict.fromkeys(map(machine, everything)), start=1)
    }
    groups = grouped(everything, lambda r: (r.workload, r.command, r.commit, machine(r)))
    rows = [
        (r.workload, r.command, machines[machine(r)], f"{len(own):,}", own)
        for own in groups.values()
        if (r := own[0])
    ]
    heads = [(number, *one) for one, number in machines.items()]
    yield Table(items("machine", "card", "driver", "versions"), heads, None)
    yield Table(items("workload", "repeated by", "machine", "figures"), rows, lambda row: row[4])
