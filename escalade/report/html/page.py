"""The report: the verdict, what has changed, and everything it rests on, as one file."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from escalade.measure.records import Record
from escalade.report import (
    coverage_pages,
    gaps,
    layer_pages,
    network_pages,
    peer_pages,
    step_pages,
)
from escalade.report.html import (
    accuracy,
    changes,
    coverage,
    ladder_sections,
    learning,
    memory,
    networks,
    origins,
    plans,
    tiles,
    training,
    verdict,
)
from escalade.report.html.rendering import block, page
from escalade.report.html.section import CardRecords, Section
from escalade.report.plans.page import plans_page
from escalade.report.tables import PREFERRED_GPU, on_cards

Records = Mapping[str, Sequence[Record]]
"""Records by GPU folder."""


def report(records: Records, since: changes.Changes | None = None) -> str:
    """The whole file."""
    everything = [record for own in records.values() for record in own]
    measured = on_cards(records)
    environment = Environment(
        loader=PackageLoader("escalade.report.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        tiles=[tile for own in measured.values() for tile in tiles.all_tiles(list(verdict.rows(own)), own)],
        sections=list(sections(measured, everything, since)),
        cards=", ".join(sorted({record.gpu for record in everything})),
        figures=len(everything),
        day=max(record.date for record in everything)[:10],
    )


def sections(
    measured: CardRecords, everything: Sequence[Record], since: changes.Changes | None
) -> Iterator[Section]:
    """All of them, in their order."""
    timed = [record for own in measured.values() for record in own]
    yield Section(
        "verdict", "Verdict", _each_card(measured, lambda own: verdict.text(list(verdict.rows(own))))
    )
    if since is not None:
        yield Section("changes", "Slower and faster than before", block(changes.text(since)))
    yield from ladder_sections.sections(measured, everything)
    yield Section(
        "networks",
        "Networks, by batch",
        page(network_pages.networks_page(measured, PREFERRED_GPU), folded=3),
        list(networks.pictures(measured)),
    )
    yield Section(
        "plans", "Plans, step by step", page(step_pages.steps_page(measured, PREFERRED_GPU)),
        list(plans.pictures(measured)),
    )  # fmt: skip
    yield Section(
        "predictions",
        "Plans, predicted and measured",
        Markup("").join(page(plans_page(own)) for own in measured.values()),
    )
    yield Section(
        "memory", "Memory", block(memory.missing(timed)) + _each_card(measured, memory.text),
        list(memory.pictures(measured)),
    )  # fmt: skip
    yield Section("layers", "Single layers", page(layer_pages.layers_page(measured, PREFERRED_GPU), folded=4))
    yield Section(
        "coverage",
        "Coverage: every network of a module",
        page(coverage_pages.coverage_page(measured, PREFERRED_GPU), folded=3),
        list(coverage.pictures(measured)),
    )
    yield Section(
        "training",
        "Steps of training",
        _each_card(measured, training.text),
        list(training.pictures(measured)),
    )
    yield Section(
        "learning", "Training curves", block(learning.text(everything)), list(learning.pictures(everything))
    )
    yield Section("accuracy", "How right it is", block(accuracy.text(timed)), list(accuracy.pictures(timed)))
    yield Section("peers", "Peers", block(peer_pages.block(timed)))
    yield Section("gaps", "What is not measured", _each_card(measured, gaps.block))
    yield Section("provenance", "Where each figure comes from", block(origins.provenance(everything)))


def _each_card(records: CardRecords, make: Callable[[Sequence[Record]], str]) -> Markup:
    """What each card's records say, below its name."""
    if not records:
        return block("Nothing was measured on a card yet: `escalade measure`.\n")
    return block("\n".join(f"## {own[0].gpu}\n\n{make(own)}\n" for own in records.values()))
