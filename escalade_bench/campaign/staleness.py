"""Decide which units are current: compare each with its records, by plan and machine code, not by commit.

A peer's figure does not depend on our code. It is measured again only with another driver, PyTorch, CUDA or cuDNN.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from escalade.device.timing import percentile
from escalade.tune.refusal import failure_reason
from escalade_bench.campaign import registry
from escalade_bench.campaign.units import Session, Unit
from escalade_bench.measure.currency import GONE, changed, package_digest, same_versions
from escalade_bench.measure.records import Provenance, Record
from escalade_bench.peers.network import TO_MAKE

WORKLOAD = "campaign"
"""The workload of the records that log a unit's last run."""
BEGUN = "begun"
"""Config key of such a record: the unit was begun and has not ended, so it may have crashed its process."""
SECONDS, ALONE, DECLARED = "seconds", "seconds_alone", "declared"
"""Config keys of such a record: the duration with all peers, the duration with reused figures of peers, and what the
unit declared at its last complete run."""
_COMPARED_ACROSS_RUNS = ("network", "coverage")
_ALONE_SHARE = 0.7
"""Part of the duration that is expected without peers, until it is measured."""
_LEAST_SHARE = 0.1
"""The least such part, if making the peers took longer than all."""
_MANY = 100
"""Records to plan and compile from which several processes are faster, though each takes ten seconds to start."""
_RARELY_EXCEEDED = 0.75
"""Quantile of the durations of similar units that is expected of one that was never measured."""


@dataclass(frozen=True)
class State:
    """A unit, why it has to be measured (empty: it is current), and how long that should take."""

    unit: Unit
    why: str
    seconds: float = 0.0
    failure: str = ""
    """Why its last run failed, of a unit that would fail again."""
    tried: bool = False
    """True if its last run ended the process; it is measured after all others."""
    older: Mapping[tuple[str, ...], str] | None = None
    """Per key of its own records, why each is no longer current."""
    reused: frozenset[str] = frozenset()
    """Peers with current figures, which are not measured again."""
    known: Mapping[str, Any] = field(default_factory=dict)
    """`SECONDS`, `ALONE` and `DECLARED` of earlier runs."""

    @property
    def stale(self) -> bool:
        return bool(self.why)


@dataclass(frozen=True)
class Check:
    """Decides which units are current on one card."""

    session: Session
    architecture: str
    here: Provenance | None = None
    """Driver and versions; without them peers of any version are current."""
    again: bool = False
    """True to measure every unit and every peer."""

    def states(self, units: Iterable[Unit], records: Sequence[Record]) -> list[State]:
        """Return the state of every unit, by the card's records."""
        log = {record.problem: record for record in records if record.workload == WORKLOAD}
        own: dict[str, list[Record]] = {}
        for record in records:
            if record.case:
                own.setdefault(record.case, []).append(record)
        found, given = [], [(unit, log.get(unit.name), own.get(unit.name, [])) for unit in units]
        for (unit, last, mine), state in zip(given, self._states(given), strict=True):
            before = {
                name: last.config[name] for name in (SECONDS, ALONE, DECLARED) if last and name in last.config
            }
            if last and last.failure:
                before.pop(DECLARED, None)
            complete = before.get(DECLARED) == list(unit.declared)
            reused = self._reusable(unit, mine) if complete and not self.again else frozenset()
            made = sum(r.config.get(TO_MAKE, 0.0) for r in mine if r.system in reused)
            seconds = _expected(unit, before, made if reused else None, log)
            why = state.why or ("asked for again" if self.again else "")
            found.append(replace(state, why=why, seconds=seconds, reused=reused, known=before))
        return found

    def _states(self, given: Sequence[tuple[Unit, Record | None, Sequence[Record]]]) -> Iterable[State]:
        """Yield the state of every unit, compared in several processes if many records have to be."""
        unknown = (record for unit, _, own in given if unit.made for record in own if not record.is_peer)
        workers = min(
            os.cpu_count() or 1, sum(record.checked != package_digest() for record in unknown) // _MANY
        )
        if workers < 2:
            yield from (self.state(*one) for one in given)
            return
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(workers, spawn, torch.set_num_threads, (1,)) as pool:
            named = [(self.architecture, self.here, unit.name, last, own) for unit, last, own in given]
            for (unit, *_), state in zip(
                given, pool.map(_state_by_name, *zip(*named, strict=True)), strict=True
            ):
                yield replace(state, unit=unit)

    def state(self, unit: Unit, last: Record | None, own: Sequence[Record]) -> State:
        """Return why a unit has to be measured, by the log of its last run and its records."""
        found = self._state(unit, last, own)
        self.session.clear()
        return found

    def _reusable(self, unit: Unit, own: Sequence[Record]) -> frozenset[str]:
        """Return the peers that every comparison of the unit has a figure of, made as it would be here.

        Only networks are compared across runs: the gains of rungs and layers are those of one run.
        """
        if self.here is None or unit.kind not in _COMPARED_ACROSS_RUNS:
            return frozenset()
        compared = {record.comparison for record in own}
        measured: dict[str, set[tuple[str, str, str]]] = {}
        for record in own:
            same = record.driver == self.here.driver and same_versions(record.versions, self.here.versions)
            timed_alike = _options(record.command) == _options(unit.command)
            if record.is_peer and not record.failure and same and timed_alike:
                measured.setdefault(record.system, set()).add(record.comparison)
        return frozenset(system for system, problems in measured.items() if problems == compared)

    def _state(self, unit: Unit, last: Record | None, own: Sequence[Record]) -> State:
        if last is None:
            return State(unit, "never measured")
        if BEGUN in last.config or (DECLARED not in last.config and not last.failure):
            return State(unit, "begun, and not measured to its end", tried=BEGUN in last.config)
        if last.failure:
            changed_since = last.checked != package_digest()
            why = "it failed, and the package has changed since" if changed_since else ""
            return State(unit, why, failure=last.failure)
        if tuple(last.config[DECLARED]) != unit.declared:
            return State(unit, "it asks for other rungs, peers or sizes")
        if self.here is not None and unit.declared and not same_versions(last.versions, self.here.versions):
            return State(unit, f"its peers were measured with PyTorch {last.versions.get('torch')}")
        older: dict[tuple[str, ...], str] = {}
        for record in own if unit.made else ():
            if not record.is_peer and not record.failure:
                older[record.key] = self._changed(unit, record)
        wrong = (
            f"{record.system} was wrong, and the package has changed since"
            for record in own
            if record.failure and record.layout and not record.is_peer and record.checked != package_digest()
        )
        # Measuring again would not replace the figure of a rung that is gone.
        reasons = [reason for reason in older.values() if reason != GONE] or older.values()
        why = next(filter(None, (*reasons, *wrong)), "") if own else "its records are gone"
        return State(unit, why, older=older)

    def _changed(self, unit: Unit, record: Record) -> str:
        assert unit.made is not None
        if record.checked == package_digest():
            return record.older
        try:
            return changed(record, unit.made(self.session, record), self.architecture)
        except Exception as error:  # planning runs models of any kind
            return f"it cannot be planned here: {failure_reason(error).splitlines()[0]}"


@cache
def _units() -> Mapping[str, Unit]:
    return registry.units()


def _state_by_name(
    architecture: str, here: Provenance | None, name: str, last: Record | None, own: Sequence[Record]
) -> Any:
    """Return the state of a unit of the registry, in another process; without the unit, which cannot be sent."""
    check = Check(Session(torch.device("cpu")), architecture, here)
    return replace(check.state(_units()[name], last, own), unit=None)  # type: ignore[arg-type]


def _options(command: str) -> str:
    """Return the options of timing, which are at the end of a command."""
    return command.rpartition("--seconds ")[2]


def _expected(unit: Unit, known: Mapping[str, Any], made: float | None, log: Mapping[str, Record]) -> float:
    """Return the expected duration: that of the last run, of units with a similar name, or the unit's own guess.

    `made`: the seconds that making the peers took, if their figures are reused.
    """
    if made is not None and ALONE in known:
        return float(known[ALONE])
    share = 1.0 if made is None else _ALONE_SHARE
    if SECONDS in known:
        seconds = float(known[SECONDS])
        return seconds if made is None else max(_LEAST_SHARE * seconds, min(share * seconds, seconds - made))
    steps = unit.name.split("/")
    for length in range(len(steps) - 1, 1, -1):
        begin = "/".join(steps[:length]) + "/"
        similar = [r.config[SECONDS] for n, r in log.items() if n.startswith(begin) and SECONDS in r.config]
        if similar:
            return share * percentile(similar, 100 * _RARELY_EXCEEDED)
    return share * unit.seconds
