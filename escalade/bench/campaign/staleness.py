"""What is missing or overtaken: every unit beside its last run, by what that was made of, not by its commit."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from escalade.bench.campaign.units import PROTOCOL, Unit
from escalade.measure import sources
from escalade.measure.records import Record

WORKLOAD = "campaign"
"""The workload of the records that say when a unit was run, how long it took, and what it was made of."""
BEGUN = "begun"
"""In the config of such a record: the unit was begun, and nothing has been heard of it since."""
_NAMED = 3
_MOST_RATIO = 4.0
"""How far off a prediction may be, to count: one unit is not to decide what there is time for."""


@dataclass(frozen=True)
class State:
    """A unit, why it is to be measured (empty: it need not be), and how long that should take."""

    unit: Unit
    why: str
    seconds: float
    failure: str = ""
    """Why its last run was not to the end, of a unit that need not be measured: it would fail again."""
    tried: bool = False
    """Whether it was begun and not measured to its end, by whatever ended the process: others come first."""

    @property
    def stale(self) -> bool:
        return bool(self.why)

    @property
    def worth(self) -> float:
        """What a second of it buys."""
        return self.unit.value / self.seconds


def states(
    units: Iterable[Unit], records: Sequence[Record], versions: Mapping[str, str] | None = None
) -> list[State]:
    """The state of every unit on one card; without `versions` those of the records are taken to be the present ones."""
    log = {record.problem: record for record in records if record.workload == WORKLOAD}
    there: dict[tuple[str, str, str], set[str]] = {}
    for record in records:
        there.setdefault(record.comparison, set()).add(record.commit)
    known = list(units)
    scales = _scales(known, log)
    return [_state(unit, log.get(unit.name), there, versions, scales.get(unit.kind, 1.0)) for unit in known]


def _scales(units: Sequence[Unit], log: Mapping[str, Record]) -> dict[str, float]:
    """How many times as long as thought units of each kind took, in the middle of those that ran, and at least once:
    that others were quicker is no promise of one that has not run."""
    seen: dict[str, list[float]] = {}
    for unit in units:
        last = log.get(unit.name)
        if last is not None and not last.failure and BEGUN not in last.config:
            seen.setdefault(unit.kind, []).append(off(last.config["seconds"], unit.seconds))
    return {kind: max(1.0, statistics.median(ratios)) for kind, ratios in seen.items()}


def off(seconds: float, predicted: float) -> float:
    """How many times as long as predicted it took, as far as that counts for others."""
    return min(_MOST_RATIO, max(1 / _MOST_RATIO, seconds / predicted))


def _state(
    unit: Unit,
    last: Record | None,
    there: Mapping[tuple[str, str, str], set[str]],
    versions: Mapping[str, str] | None,
    scale: float,
) -> State:
    if last is None:
        return State(unit, "never measured", scale * unit.seconds)
    if BEGUN in last.config:
        return State(unit, "begun, and not measured to its end", scale * unit.seconds, tried=True)
    return State(unit, _overtaken(unit, last, there, versions), last.config["seconds"], last.failure)


def _overtaken(
    unit: Unit,
    last: Record,
    there: Mapping[tuple[str, str, str], set[str]],
    versions: Mapping[str, str] | None,
) -> str:
    changed = sources.overtaken(last.sources)
    if changed:
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        return f"changed since: {', '.join(changed[:_NAMED])}{more}"
    if last.sources.get(sources.DECLARED) != declared(unit)[sources.DECLARED]:
        return "asked for otherwise since: rungs, peers or the way of measuring"
    here = last.versions if versions is None else versions
    for name in sources.COMPARED_VERSIONS:
        if last.versions.get(name) != here.get(name):
            return f"measured with {name} {last.versions.get(name)}, not {here.get(name)}"
    gone = [one for one in last.config["comparisons"] if there.get(tuple(one)) != {last.commit}]
    return f"another run took the place of {' '.join(gone[0])}" if gone else ""


def declared(unit: Unit) -> dict[str, str]:
    """The hash of how a unit asks for its figures."""
    return sources.declared(PROTOCOL, *unit.declared)
