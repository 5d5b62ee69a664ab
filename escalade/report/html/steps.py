"""A plan as a picture: the time of each step beside the least that it needs."""

from __future__ import annotations

from matplotlib.figure import Figure

from escalade.report import cells
from escalade.report.html.bars import named_rows
from escalade.report.step_pages import Run

_TIME, _FLOOR = "#2f6db5", "#b58a1b"


def step_figure(run: Run, title: str) -> Figure:
    """A bar a step, in the order of the plan, and a shorter one inside it for its floor."""
    names = [
        f"{step.config['number']}: {step.config['operation']}, {step.config['rung']}" for step in run.steps
    ]
    figure, axes = named_rows(names, 0.24, "µs", title)
    places = range(len(names))
    bars = axes.barh(places, [step.median_us or 0.0 for step in run.steps], color=_TIME, label="time")
    axes.barh(places, [step.floor_us or 0.0 for step in run.steps], height=0.35, color=_FLOOR, label="floor")
    for place, bar in enumerate(bars):
        bar.set_gid(f"step-{place}")
    axes.bar_label(bars, [cells.microseconds(step) for step in run.steps], fontsize=7, padding=2)
    axes.legend(fontsize=8, frameon=False)
    return figure
