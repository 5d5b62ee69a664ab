"""A plan as a picture: each step a block as wide as its time, and below it what lies in the arena meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from escalade.bench.networks.steps import SUFFIX
from escalade.report import cells
from escalade.report.html.bars import WIDTH
from escalade.report.html.section import CardRecords, Picture
from escalade.report.html.svg import BLUE, GREEN, GREY, PURPLE, inline
from escalade.report.step_pages import Run, newest_run

_HEIGHT, _LEFT, _RIGHT = 4.0, 0.65, 0.1
_LETTERS = 0.12
"""Inches that a line of letters needs, on its side."""
_RATIO = 0.24
"""Inches that a ratio above a block needs."""
_TURNS = (GREEN, PURPLE, GREY)
"""Colours of neighbours in the arena."""


@dataclass(frozen=True)
class Timeline:
    """When each step of a run begins and ends, one behind another as if nothing overlapped."""

    run: Run

    @property
    def ends(self) -> list[float]:
        """Microseconds at which the steps end, from the beginning of the first on."""
        return list(accumulate((step.median_us or 0.0 for step in self.run.steps), initial=0.0))

    def span(self, first: int, last: int) -> tuple[float, float]:
        """From the beginning of one step to the end of another, by their numbers; those that are none count for the
        nearest."""
        ends = self.ends
        return ends[max(first, 1) - 1], ends[min(last, len(ends) - 1)]


def pictures(records: CardRecords) -> Iterator[Picture]:
    """The newest plan of each network, batch and dtype whose steps were timed."""
    for gpu, own in records.items():
        plans = dict.fromkeys((r.workload, r.batch, r.dtype) for r in own if r.workload.endswith(SUFFIX))
        for number, plan in enumerate(plans):
            run = newest_run(own, *plan)
            if run is not None:
                workload, batch, dtype = plan
                title = f"{workload.removesuffix(SUFFIX)}, batch {batch}, {dtype}, on {own[0].gpu}"
                drawn = inline(partial(plan_figure, run), f"plan-{gpu}-{number}", title, dict(_words(run)))
                yield Picture(title, drawn, _caption(run), is_plan=True)


def _caption(run: Run) -> str:
    said = (
        f"Each step is as wide as its time by itself, its dark part as wide as its floor; above it, how many times its "
        f"floor it takes. In one go the plan takes {cells.figure(run.plan.median_us)} µs. "
    )
    if not run.plan.config.get("arena"):
        return (
            said + f"What lies in the arena when is not in this record: `{run.plan.command}` writes it now."
        )
    return said + (
        f"Below: what lies where in the arena of {_kibibytes(run.plan.config['memory']['arena'])} and when; a value is "
        "there from the step that writes it to the last that reads it."
    )


def plan_figure(run: Run) -> Figure:
    """The steps, and under them the arena if the record has it."""
    arena = run.plan.config.get("arena")
    height = _HEIGHT if arena else 2.1
    figure = Figure(figsize=(WIDTH, height))
    wide = 1 - (_LEFT + _RIGHT) / WIDTH
    top = figure.add_axes((_LEFT / WIDTH, 1 - 1.5 / height, wide, 1.2 / height))
    line = Timeline(run)
    _draw_steps(top, line)
    below = top
    if arena:
        below = figure.add_axes((_LEFT / WIDTH, 0.5 / height, wide, 1 - (1.5 + 0.65) / height), sharex=top)
        top.tick_params(labelbottom=False)
        _draw_arena(below, line, arena)
    below.set_xlabel("µs")
    top.set_xlim(0, line.ends[-1])
    return figure


def _draw_steps(axes: Any, line: Timeline) -> None:
    inch = (WIDTH - _LEFT - _RIGHT) / line.ends[-1]
    for step, begin in zip(line.run.steps, line.ends, strict=False):
        number, time, floor = step.config["number"], step.median_us or 0.0, step.floor_us or 0.0
        axes.add_patch(
            Rectangle((begin, 0), time, 1, facecolor=BLUE, alpha=0.35, edgecolor="none", gid=f"step-{number}")
        )
        axes.add_patch(Rectangle((begin, 0), min(floor, time), 1, facecolor=BLUE, edgecolor="none"))
        axes.plot((begin, begin), (0, 1), color=BLUE, linewidth=0.6)
        if time * inch >= _LETTERS:
            name = f"{number}  {step.config['rung']}"
            axes.text(begin + time / 2, 0.04, name, rotation=90, ha="center", va="bottom", fontsize=6.5)
        if floor and time * inch >= _RATIO:
            axes.text(begin + time / 2, 1.03, f"{time / floor:.1f}×", ha="center", va="bottom", fontsize=6)
    axes.set_ylim(0, 1)
    axes.set_yticks([])
    axes.set_ylabel("steps")
    axes.spines["left"].set_visible(False)


def _draw_arena(axes: Any, line: Timeline, arena: Sequence[dict[str, Any]]) -> None:
    for place, block in enumerate(arena):
        begin, end = line.span(block["first"], block["last"])
        axes.add_patch(
            Rectangle(
                (begin, block["offset"] / 2**10),
                end - begin,
                block["bytes"] / 2**10,
                facecolor=_TURNS[place % len(_TURNS)],
                alpha=0.6,
                edgecolor="none",
                gid=f"value-{block['first']}-{place}",
            )
        )
    axes.set_ylim(0, max(block["offset"] + block["bytes"] for block in arena) / 2**10)
    axes.set_ylabel("arena, KiB")


def _words(run: Run) -> Iterator[tuple[str, str]]:
    """What each block stands for."""
    for step in run.steps:
        said, over = step.config, cells.over_floor(step)
        yield (
            f"step-{said['number']}",
            f"{said['number']}: {said['source']}, {said['operation']} {said['problem']} by {said['rung']} "
            f"({', '.join(said['kernels'])}), {cells.microseconds(step)} µs" + (f", {over}× its floor" if over else ""),
        )  # fmt: skip
    for place, block in enumerate(run.plan.config.get("arena", ())):
        yield (
            f"value-{block['first']}-{place}",
            f"{block['name']}: {_kibibytes(block['bytes'])} at {_kibibytes(block['offset'])}, steps {block['first']} "
            f"to {block['last']}",
        )  # fmt: skip


def _kibibytes(count: int) -> str:
    return f"{count / 2**10:,.0f} KiB"
