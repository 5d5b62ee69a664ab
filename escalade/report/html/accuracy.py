"""How right it is: of each workload and dtype the result of ours that is nearest to what is allowed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.figure import Figure

from escalade.measure.records import Record
from escalade.report import cells
from escalade.report.html.bars import named_rows
from escalade.report.html.section import Picture
from escalade.report.html.svg import GREEN, GREY, RED, inline
from escalade.report.markdown import table


@dataclass(frozen=True)
class Group:
    """Our results of a workload in one dtype."""

    records: tuple[Record, ...]

    @property
    def worst(self) -> Record:
        return max(self.records, key=of_allowed)

    @property
    def name(self) -> str:
        return f"{self.worst.workload}, {self.worst.dtype}"


def of_allowed(record: Record) -> float:
    """The error as a share of what is allowed; 0 where there is none."""
    return record.error / record.tolerance if record.error is not None and record.tolerance else 0.0


def groups(records: Sequence[Record]) -> list[Group]:
    """What was verified."""
    found: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        if not record.is_peer and (record.failure or record.error is not None):
            found.setdefault((record.workload, record.dtype), []).append(record)
    return [Group(tuple(own)) for own in found.values()]


def text(records: Sequence[Record]) -> str:
    """A row for each group."""
    header = (
        "workload", "dtype", "nearest to its limit", "verified", "failed", "its error", "allowed", "of allowed",
        "right of labelled images",
    )  # fmt: skip
    return table(header, map(_cells, groups(records)), left=3)


def _cells(group: Group) -> tuple[str, ...]:
    worst, own = group.worst, group.records
    known = [r for r in own if r.accuracy is not None]
    labelled = max(known, key=lambda record: record.batch, default=None)
    return (
        worst.workload, worst.dtype, f"`{worst.problem}`", f"{len(own):,}", str(sum(bool(r.failure) for r in own)),
        cells.error(worst.error), cells.error(worst.tolerance), cells.share(of_allowed(worst) or None),
        f"{labelled.accuracy:.4f} of {labelled.batch:,}" if labelled else "",
    )  # fmt: skip


def pictures(records: Sequence[Record]) -> Iterator[Picture]:
    """How near to its limit each group comes."""
    found = [group for group in groups(records) if of_allowed(group.worst)]
    if found:
        title = "The largest error of all verified results, as a share of what is allowed"
        yield Picture(title, inline(partial(error_figure, found), "accuracy", title))


def error_figure(found: Sequence[Group]) -> Figure:
    """A bar for each group; the line is the limit."""
    figure, axes, middles = named_rows(
        [group.name for group in found], [0.22] * len(found), "percent of the allowed error"
    )
    shares = [100 * of_allowed(group.worst) for group in found]
    bars = axes.barh(middles, shares, height=0.14, color=[RED if share > 100 else GREEN for share in shares])
    for place, bar in enumerate(bars):
        bar.set_gid(f"error-{place}")
    axes.bar_label(bars, [f"{share:.0f}%" for share in shares], fontsize=7, padding=2)
    axes.axvline(100, color=GREY, linewidth=0.8)
    return figure
