"""A section for each ladder: its gains, predicted and measured, its roofline, what its rungs ask for, its tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from markupsafe import Markup

from escalade.measure.records import Record
from escalade.ops import OPERATIONS
from escalade.report import counts, operation_pages
from escalade.report.html import ladders
from escalade.report.html.rendering import block, page
from escalade.report.html.section import CardRecords, Picture, Section
from escalade.report.html.svg import inline
from escalade.report.tables import PREFERRED_GPU

_BY = {"twin": "Counted on the twin", "ncu": "Counted by Nsight Compute"}
_COMMANDS = {"twin": "count {}", "ncu": "profile {} --problem NAME --beside-twin"}
"""What counts, by who does."""


def sections(measured: CardRecords, everything: Sequence[Record]) -> Iterator[Section]:
    """One for each operation that was measured or counted, with the pictures of each card."""
    pages = operation_pages.pages(measured, PREFERRED_GPU)
    counted = {record.workload for record in everything if record.counts}
    texts = {name: pages.get(f"{operation_pages.FOLDER}/{name}.md", "") for name in OPERATIONS}
    names = [name for name, text in texts.items() if text or name + counts.SUFFIX in counted]
    if not names:
        return
    yield Section("ladders", "Ladders", block(f"{len(names)} of {len(OPERATIONS)} ladders are recorded.\n"))
    for name in names:
        text = page(texts[name], folded=3) if texts[name] else Markup("")
        pictures = [picture for gpu, own in measured.items() for picture in _pictures(gpu, own, name)]
        body = block(counters(everything, name)) + text
        yield Section(f"ladder-{name}", name, body, pictures, inner=True)


def counters(records: Sequence[Record], operation: str) -> str:
    """What rungs ask of memory and of each unit, by who has counted and by problem; what is missing in a sentence."""
    own = [r for r in records if r.workload == operation + counts.SUFFIX and r.counts]
    parts = ["### Counters\n\n"]
    missing = [command for how, command in _COMMANDS.items() if not any(r.timing == how for r in own)]
    if missing:
        commands = ", ".join(
            f"`escalade {command.format(operation)} --results results`" for command in missing
        )
        parts.append(f"Not recorded yet: {commands}.\n\n")
    for how, problem, gpu in dict.fromkeys((r.timing, r.problem, r.gpu) for r in own):
        some = [r for r in own if (r.timing, r.problem, r.gpu) == (how, problem, gpu)]
        parts.append(f"#### {_BY[how]}: `{problem}`, {gpu}\n\n{counts.page_table(some)}\n")
    return "".join(parts)


def _pictures(gpu: str, records: Sequence[Record], name: str) -> Iterator[Picture]:
    problem = ladders.main_problem(records, name)
    card = records[0].gpu
    found = ladders.gains(records, name, problem)
    if found:
        title = f"Gains over the rung below: {problem} on {card}"
        yield Picture(
            title,
            inline(partial(ladders.gain_figure, found), f"gains-{gpu}-{name}", title),
            "Each rung over the one it stands on, as it was predicted before the first run, for the kind of "
            "problem that it is made for, and as it was measured on this one.",
        )
    points = ladders.points(records, name)
    if points:
        limits = ladders.roofs(records, name)
        title = f"Roofline of {name} on {card}"
        yield Picture(
            title,
            inline(partial(ladders.roofline_figure, points, limits), f"roofline-{gpu}-{name}", title),
            "A point for each rung on each problem; those that are the fastest somewhere are named, the best peers are "
            f"crosses. {ladders.roof_sentence(limits)}",
        )
