"""The report: sections of records, pictures and where they come from, as one file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from escalade.measure.records import Record
from escalade.ops import OPERATIONS
from escalade.report import (
    ablation_pages,
    coverage_pages,
    coverage_rows,
    gaps,
    gpu_tests,
    layer_pages,
    network_pages,
    operation_pages,
    pair_pages,
    peer_pages,
    step_pages,
    training_pages,
)
from escalade.report.html import changes, coverage, ladders, origins, steps, verdict
from escalade.report.html.rendering import block, page
from escalade.report.html.svg import inline
from escalade.report.network_plots import network_figure
from escalade.report.tables import PREFERRED_GPU

Records = Mapping[str, Sequence[Record]]
"""Records by GPU folder."""


@dataclass(frozen=True)
class Picture:
    """A plot with what is to be said of it."""

    svg: Markup
    caption: str = ""


@dataclass(frozen=True)
class Section:
    """A part of the report, with a name that links lead to."""

    key: str
    title: str
    body: Markup
    pictures: Sequence[Picture] = field(default_factory=tuple)
    inner: bool = False
    """Whether it belongs to the section before it."""


def report(records: Records, since: changes.Changes | None = None) -> str:
    """The whole file."""
    everything = [record for own in records.values() for record in own]
    environment = Environment(
        loader=PackageLoader("escalade.report.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        sections=list(sections(records, since)),
        cards=", ".join(sorted({record.gpu for record in everything})),
        figures=len(everything),
        day=max(record.date for record in everything)[:10],
    )


def sections(records: Records, since: changes.Changes | None = None) -> Iterator[Section]:
    """The verdict, what has changed, then everything it rests on."""
    measured = {
        gpu: timed
        for gpu in sorted(records, key=lambda name: (name != PREFERRED_GPU, name))
        if (timed := [record for record in records[gpu] if record.workload != gpu_tests.WORKLOAD])
    }
    everything = [record for own in measured.values() for record in own]
    yield Section("verdict", "Verdict", _each_gpu(measured, verdict.text))
    if since is not None:
        yield Section("changes", "Slower and faster than before", block(changes.text(since)))
    yield from _ladders(measured)
    yield Section(
        "networks",
        "Networks, by batch",
        page(network_pages.networks_page(dict(measured), PREFERRED_GPU)),
        list(_network_pictures(measured)),
    )
    yield Section(
        "steps",
        f"{step_pages.TITLE}, step by step",
        page(step_pages.steps_page(measured, PREFERRED_GPU)),
        list(_step_pictures(measured)),
    )
    yield Section(
        "layers", "Single layers", page(layer_pages.layers_page(dict(measured), PREFERRED_GPU), folded=4)
    )
    yield Section(
        "coverage",
        "Coverage: every network of a module",
        page(coverage_pages.coverage_page(measured, PREFERRED_GPU), folded=3),
        list(_coverage_pictures(measured)),
    )
    yield Section("training", "Steps of training", _each_gpu(measured, _training))
    yield Section("accuracy", "How right it is", block(origins.accuracy(everything)))
    yield Section("peers", "Peers", block(peer_pages.block(everything)))
    yield Section("gaps", "What is not measured", _each_gpu(measured, gaps.block))
    yield Section("provenance", "Where each figure comes from", block(origins.provenance(everything)))


def _each_gpu(records: Records, make: verdict.Text) -> Markup:
    parts = [f"## {own[0].gpu}\n\n{make(own)}\n" for own in records.values()]
    return block("\n".join(parts))


def _training(records: Sequence[Record]) -> str:
    parts = (training_pages, ablation_pages, pair_pages)
    titles = ("Beside PyTorch", "What each technique brings", "Pairs of variants")
    return "\n".join(
        f"### {title}\n\n{part.block(records)}" for title, part in zip(titles, parts, strict=True)
    )


def _ladders(records: Records) -> Iterator[Section]:
    """A section for each operation that was measured, with the pictures of each GPU."""
    pages = operation_pages.pages(records, PREFERRED_GPU)
    names = [name for name in OPERATIONS if f"{operation_pages.FOLDER}/{name}.md" in pages]
    if names:
        yield Section(
            "ladders", "Ladders", block(f"{len(names)} of {len(OPERATIONS)} ladders are recorded.\n")
        )
    for name in names:
        text = pages[f"{operation_pages.FOLDER}/{name}.md"]
        pictures = [p for gpu, own in records.items() for p in _ladder_pictures(gpu, own, name)]
        yield Section(f"ladder-{name}", name, page(text, folded=3), pictures, inner=True)


def _ladder_pictures(gpu: str, records: Sequence[Record], name: str) -> Iterator[Picture]:
    problem = ladders.main_problem(records, name)
    card = records[0].gpu
    found = ladders.gains(records, name, problem)
    if found:
        title = f"{name} {problem} on {card}: gains over the rung below"
        drawn = partial(ladders.gain_figure, found, title)
        yield Picture(
            inline(drawn, f"gains-{gpu}-{name}", title),
            "Each rung over the one it stands on, as it was predicted before the first run, for the kind of "
            "problem that it is made for, and as it was measured on this one.",
        )
    points = ladders.points(records, name)
    if points:
        limits = ladders.roofs(records, name)
        title = f"{name} on {card}: roofline"
        drawn = partial(ladders.roofline_figure, points, limits, title)
        yield Picture(
            inline(drawn, f"roofline-{gpu}-{name}", title),
            "A point for each rung on each problem; those that are the fastest somewhere are named, the best peers are "
            f"crosses. {ladders.roof_sentence(limits)}",
        )


def _network_pictures(records: Records) -> Iterator[Picture]:
    for gpu, own in records.items():
        for name in network_pages.networks(own):
            if network_pages.has_plot(network_pages.of_network(own, name), name):
                shown = network_pages.plotted(own, name)
                yield Picture(
                    inline(partial(network_figure, shown, name, columns=2), f"network-{gpu}-{name}", name)
                )


def _step_pictures(records: Records) -> Iterator[Picture]:
    for gpu, own in records.items():
        run = step_pages.latest(own)
        if run is not None:
            title = f"{step_pages.TITLE} on {own[0].gpu}: each step beside its floor"
            yield Picture(inline(partial(steps.step_figure, run, title), f"steps-{gpu}", title))


def _coverage_pictures(records: Records) -> Iterator[Picture]:
    for gpu, own in records.items():
        for number, part in enumerate(coverage_rows.parts(own)):
            found = coverage.ratios(part)
            if found:
                title = f"{part.title} on {own[0].gpu}"
                drawn = partial(coverage.coverage_figure, found, title)
                yield Picture(inline(drawn, f"coverage-{gpu}-{number}", title))
