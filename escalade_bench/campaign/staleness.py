"""Which units are current: each beside its records, by plan and machine code, not by commit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from escalade.tune.refusal import reason
from escalade_bench.campaign.units import Session, Unit
from escalade_bench.measure.currency import changed, package_digest, same_versions
from escalade_bench.measure.records import Record

WORKLOAD = "campaign"
"""The workload of the records that log a unit's last run."""
BEGUN = "begun"
"""In the config of such a record: the unit was begun and has not ended, so it may have ended its process."""


@dataclass(frozen=True)
class State:
    """A unit, why it has to be measured (empty: it is current), and how long that should take."""

    unit: Unit
    why: str
    seconds: float
    failure: str = ""
    """Why its last run failed, of a unit that would fail again."""
    tried: bool = False
    """True if its last run ended the process; it is measured after all others."""
    older: Mapping[tuple[str, ...], str] | None = None
    """Per key of its own records, why each is no longer current."""

    @property
    def stale(self) -> bool:
        return bool(self.why)


def states(
    units: Iterable[Unit],
    records: Sequence[Record],
    session: Session,
    architecture: str,
    versions: Mapping[str, str] | None = None,
) -> list[State]:
    """Return the state of every unit on one card; without `versions` peers of any version are current."""
    log = {record.problem: record for record in records if record.workload == WORKLOAD}
    own: dict[str, list[Record]] = {}
    for record in records:
        if record.case:
            own.setdefault(record.case, []).append(record)
    found = []
    for unit in units:
        found.append(
            _state(unit, log.get(unit.name), own.get(unit.name, []), session, architecture, versions)
        )
        session.clear()
    return found


def _state(
    unit: Unit,
    last: Record | None,
    own: Sequence[Record],
    session: Session,
    architecture: str,
    versions: Mapping[str, str] | None,
) -> State:
    if last is None:
        return State(unit, "never measured", unit.seconds)
    if BEGUN in last.config:
        return State(unit, "begun, and not measured to its end", unit.seconds, tried=True)
    seconds = last.config["seconds"]
    if last.failure:
        return State(unit, "", seconds, last.failure)
    if tuple(last.config["declared"]) != unit.declared:
        return State(unit, "it asks for other rungs, peers or sizes", seconds)
    if versions is not None and unit.declared and not same_versions(last.versions, versions):
        return State(unit, f"its peers were measured with PyTorch {last.versions.get('torch')}", seconds)
    older: dict[tuple[str, ...], str] = {}
    for record in own if unit.made else ():
        if not record.is_peer and not record.failure:
            older[record.key] = _changed(unit, record, session, architecture)
    why = next(filter(None, older.values()), "")
    if not own:
        why = "its records are gone"
    return State(unit, why, seconds, older=older)


def _changed(unit: Unit, record: Record, session: Session, architecture: str) -> str:
    assert unit.made is not None
    if record.checked == package_digest():
        return record.older
    try:
        return changed(record, unit.made(session, record), architecture)
    except Exception as error:  # planning runs models of any kind
        return f"it cannot be planned here: {reason(error).splitlines()[0]}"
