"""Evaluation of choices by estimate against the measurements of a sweep."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from escalade import ops
from escalade.device.timing import percentile
from escalade.errors import UnsupportedError
from escalade.narrow_tables import Table
from escalade.ops.base.cards import typical_card
from escalade.ops.choose.choice import estimated
from escalade.terminal_text import counted
from escalade.tune.samples import Sample

BOUND = 2.0
"""Longest allowed time of a choice, relative to the best."""
_WORST = 10


@dataclass(frozen=True)
class Verdict:
    """Choice for one problem, compared with the best measured one."""

    key: str
    chosen: str
    best: str
    best_us: float
    chosen_us: float | None
    """None if it was not measured, or failed."""
    reason: str = ""
    """Reason for a missing time."""
    is_new: bool = False
    """True if the sweep does not have the chosen rung and config, which may be newer than it."""

    @property
    def ratio(self) -> float:
        return math.inf if self.chosen_us is None else self.chosen_us / self.best_us


@dataclass(frozen=True)
class Calibration:
    """Ratio of measured to estimated times of a rung in one dtype."""

    rung: str
    dtype: str
    count: int
    mean: float
    """Geometric mean."""
    low: float
    """10th percentile."""
    high: float
    """90th percentile."""


def judge(swept: Mapping[str, Sequence[Sample]]) -> list[Verdict]:
    """Compare the choices for all problems with the best, worst first."""
    verdicts = [_verdict(samples) for samples in swept.values()]
    return sorted(verdicts, key=lambda verdict: (-verdict.ratio, verdict.key))


def _verdict(samples: Sequence[Sample]) -> Verdict:
    first = samples[0]
    times = [(sample.us, sample.rung) for sample in samples if sample.us is not None]
    if not times:
        return Verdict(first.key, "", "", math.nan, None, "nothing could be timed")
    best_us, best = min(times)
    try:
        choice = estimated(
            ops.operation(first.operation), first.parsed(), typical_card(first.architecture or None)
        )
    except UnsupportedError as error:
        return Verdict(first.key, "", best, best_us, None, str(error))
    name = choice.rung.name
    if choice.problem.layout != first.layout:
        return Verdict(first.key, name, best, best_us, None, f"would convert to {choice.problem.layout}")
    for sample in samples:
        if sample.rung == name and sample.config == choice.config.as_dict():
            return Verdict(first.key, name, best, best_us, sample.us, sample.failure)
    return Verdict(first.key, name, best, best_us, None, f"not measured: {choice.config}", is_new=True)


def calibrations(swept: Mapping[str, Sequence[Sample]]) -> list[Calibration]:
    """Compare estimates with measurements per rung and dtype, over all measured configs that still exist."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for samples in swept.values():
        card = typical_card(samples[0].architecture or None)
        ladder = ops.operation(samples[0].operation).ladder.on(card)
        problem = samples[0].parsed()
        for name in dict.fromkeys(sample.rung for sample in samples):
            try:
                rung = ladder.rung(name)
            except UnsupportedError:  # measured by another version
                continue
            if rung.supports(problem) is not None:
                continue
            configs = rung.configs(problem)
            for sample in samples:
                if sample.rung != name or sample.us is None:
                    continue
                config = next((config for config in configs if config.as_dict() == sample.config), None)
                us = rung.estimate(problem, config) if config else None
                if us:
                    ratios.setdefault((name, sample.dtype), []).append(sample.us / us)
    return [
        Calibration(
            rung, dtype, len(found), statistics.geometric_mean(found), percentile(found, 10), percentile(found, 90)
        )
        for (rung, dtype), found in sorted(ratios.items())
    ]  # fmt: skip


def show(verdicts: Sequence[Verdict], calibrated: Iterable[Calibration], console: Console) -> bool:
    """Print the tables; returns False if a choice exceeds the bound or failed, or if there is none to compare."""
    table = Table(title="rungs: measured over estimated", title_justify="left")
    for heading in ("rung", "dtype", "configs", "geometric mean", "10 %", "90 %"):
        table.add_column(heading, justify="left" if heading in ("rung", "dtype") else "right")
    for one in calibrated:
        table.add_row(
            one.rung, one.dtype, str(one.count), f"{one.mean:.2f}", f"{one.low:.2f}", f"{one.high:.2f}"
        )
    console.print(table)
    table = Table(title=f"choices: the worst {_WORST}", title_justify="left")
    for heading in ("problem", "chosen", "µs", "best", "µs", "ratio"):
        table.add_column(heading, justify="right" if heading in ("µs", "ratio") else "left", overflow="fold")
    for verdict in verdicts[:_WORST]:
        taken = verdict.reason if verdict.chosen_us is None else f"{verdict.chosen_us:.2f}"
        table.add_row(
            verdict.key, verdict.chosen, taken, verdict.best, f"{verdict.best_us:.2f}", f"{verdict.ratio:.2f}"
        )
    console.print(table)
    ratios = [verdict.ratio for verdict in verdicts if verdict.chosen_us is not None]
    beyond = sum(ratio > BOUND for ratio in ratios)
    new = sum(verdict.is_new for verdict in verdicts)
    failed = len(verdicts) - len(ratios) - new
    if ratios:
        console.print(
            f"{counted(len(ratios), 'choice')}: {statistics.geometric_mean(ratios):.3f} times the best time (geometric "
            f"mean), {max(ratios):.2f} at worst; {beyond} above {BOUND:g}"
        )
    if new:
        console.print(
            f"{counted(new, 'choice')} not in the file, which may be older than the chosen rungs and configs; repeat "
            "the sweep to compare them"
        )
    if failed:
        console.print(f"{counted(failed, 'choice')} failed or cannot be compared")
    return bool(ratios) and not beyond and not failed
