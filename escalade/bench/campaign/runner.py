"""A campaign: units that are missing or overtaken, those first of which a second buys the most, within a budget."""

from __future__ import annotations

import itertools
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import torch

from escalade.bench.campaign.staleness import BEGUN, WORKLOAD, State, declared, off
from escalade.bench.campaign.units import Say, Session, Unit
from escalade.device import cuda
from escalade.device.precompilation import precompile
from escalade.device.program import Program
from escalade.errors import EscaladeError
from escalade.measure import ceilings as card
from escalade.measure import sources
from escalade.measure.records import Provenance, Record, now
from escalade.measure.refusal import reason

Keep = Callable[[Sequence[Record]], None]
"""Files records, as soon as they are made."""
_AHEAD = 16
"""Units whose kernels are compiled before their turn comes."""
_FREE_CORES = 2
"""Cores that compilers leave to what is measured meanwhile."""
_LEAST_SECONDS = 0.01
"""What a unit is said to have taken at least: others are compared with it."""


class LostDevice(EscaladeError):
    """The GPU does nothing more in this process; the sentence says since when."""


@dataclass
class Clock:
    """The seconds that a campaign may take, and how far predictions were off so far, for each kind of unit."""

    limit: float | None
    _began: float = field(default_factory=time.monotonic)
    _ratios: dict[str, list[float]] = field(default_factory=dict)

    @property
    def spent(self) -> float:
        return time.monotonic() - self._began

    def expected(self, states: Iterable[State]) -> float:
        """Seconds for these units, if they are as far off as others of their kind were."""
        return sum(self._factor(state) * state.seconds for state in states)

    def has_room_for(self, state: State) -> bool:
        """Whether it would still end in time; that others were quicker than expected is no promise of this one."""
        seconds = max(1.0, self._factor(state)) * state.seconds
        return self.limit is None or self.spent + seconds <= self.limit

    def took(self, state: State, seconds: float) -> None:
        self._ratios.setdefault(state.unit.kind, []).append(off(seconds, state.seconds))

    def _factor(self, state: State) -> float:
        seen = self._ratios.get(state.unit.kind)
        return statistics.median(seen) if seen else 1.0


def ordered(states: Iterable[State]) -> list[State]:
    """The units that are to be measured, first what a second buys the most of; equals as the registry has them. What
    may have ended a process comes last."""
    stale = (state for state in states if state.stale)
    return sorted(stale, key=lambda state: (state.tried, -state.worth))


def run(
    stale: Sequence[State], session: Session, origin: Provenance, clock: Clock, keep: Keep, say: Say
) -> list[State]:
    """Measures what there is time for, and gives what is left. Stopped at any point, all that `keep` was given stays.

    A unit that would not end in time is passed over for the next that would.
    """
    waiting = list(stale)
    with _Compiler(session.device) as compiler:
        if waiting:
            compiler.begin(_next(waiting, clock))
            say("measuring the card's ceilings, while kernels are compiled")
            session.ceilings  # noqa: B018  # for all units, and not on the first one's account
        while chosen := next((state for state in waiting if clock.has_room_for(state)), None):
            waiting.remove(chosen)
            began = time.monotonic()
            compiler.begin([chosen.unit])
            if chosen.unit.by_clock:
                compiler.rest()
            elif compiler.idle:  # many at once: a pool of processes takes a while to begin
                compiler.begin(_next(waiting, clock))
            compiler.wait_for(chosen.unit)
            compiling = time.monotonic() - began
            _measure(chosen.unit, session, origin, keep, say)
            seconds = time.monotonic() - began
            clock.took(chosen, seconds)
            say(
                f"{chosen.unit.name}: {seconds:.1f} s"
                + (f", {compiling:.1f} of them waiting for compilers" if compiling >= 1 else "")
                + f"; {len(waiting)} units left, about {duration(clock.expected(waiting))}"
            )
    return waiting


def _next(waiting: Iterable[State], clock: Clock) -> list[Unit]:
    """The units whose turn comes next, of those that there is time for."""
    return list(itertools.islice((state.unit for state in waiting if clock.has_room_for(state)), _AHEAD))


def _measure(unit: Unit, session: Session, origin: Provenance, keep: Keep, say: Say) -> None:
    """One unit: a record that it was begun, its records, and the record of its run in place of the first."""
    here = replace(origin, command=unit.command, date=now())
    asked = declared(unit) | (sources.table_of(origin.gpu) if unit.chooses else {})
    log = Record(WORKLOAD, unit.name, "", "", 0, "escalade", "")
    keep([replace(log, config={BEGUN: True}).stamped(here)])
    made_of: dict[str, str] = {}
    comparisons: dict[tuple[str, str, str], None] = {}
    began, failure = time.monotonic(), ""
    with cuda.noted() as programs:
        try:
            for records in unit.measure(session, say):
                found = sources.of_programs(programs)
                stamped = [_stamped(record, here, found | asked) for record in records]
                comparisons.update(dict.fromkeys(record.comparison for record in records))
                for record in stamped:
                    made_of |= record.sources
                for why in {record.throttled for record in records} - {""}:
                    say(f"{unit.name}: the card held its clock down meanwhile: {why}")
                keep(stamped)
        except Exception as broken:  # what goes wrong in one unit is no reason to lose the others
            failure = reason(broken)
            say(f"{unit.name}: {failure}")
    made_of |= sources.of_programs(programs) | asked
    seconds = max(_LEAST_SECONDS, round(time.monotonic() - began, 2))
    config = {"seconds": seconds, "comparisons": [list(comparison) for comparison in comparisons]}
    keep([replace(log, failure=failure, sources=made_of, config=config).stamped(here)])
    if failure:
        _require_device(unit, session.device)


def _stamped(record: Record, origin: Provenance, found: dict[str, str]) -> Record:
    """The record with its origin and, if it is ours, what it was made of: what it says itself, else all that ran."""
    if record.is_peer:
        return record.stamped(origin)
    own = record.sources
    kept = {name: known for name, known in found.items() if not own or name.endswith(".json")}
    return replace(record, sources=own | kept).stamped(origin)


def _require_device(unit: Unit, device: torch.device) -> None:
    """A kernel that has gone wrong may leave a GPU that answers everything with an error."""
    if device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise LostDevice(f"since {unit.name} the GPU answers everything with: {reason(error)}") from error


def ceiling_records(session: Session, origin: Provenance) -> list[Record]:
    """What the card can do, if a unit has asked."""
    if "ceilings" not in vars(session) or session.ceilings is None:
        return []
    return [record.stamped(origin) for record in card.records(session.ceilings)]


class _Compiler:
    """Kernels of the units to come, compiled by a pool of processes while others are measured."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._wanted: dict[str, tuple[Program, ...]] = {}
        self._pending: set[Program] = set()
        self._changed = threading.Condition()
        self._pool = ThreadPoolExecutor(1)

    def __enter__(self) -> _Compiler:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def begin(self, units: Iterable[Unit]) -> None:
        """Compiles for these units, in their order; what was begun before is not begun again."""
        if self._device.type != "cuda":
            return
        new: dict[Program, None] = {}
        for unit in units:
            if unit.name not in self._wanted:
                # Which programs, Python says: not while something is timed.
                self._wanted[unit.name] = tuple(unit.programs(self._device))
                new.update(dict.fromkeys(self._wanted[unit.name]))
        if new:
            with self._changed:
                self._pending |= set(new)
            self._pool.submit(self._compile, list(new))

    @property
    def idle(self) -> bool:
        return not self._pending

    def wait_for(self, unit: Unit) -> None:
        """Returns when a unit's kernels are there; what does not compile is told by the unit itself."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending.isdisjoint(self._wanted.get(unit.name, ())))

    def rest(self) -> None:
        """Returns when nothing is being compiled."""
        with self._changed:
            self._changed.wait_for(lambda: self.idle)

    def _compile(self, wanted: Sequence[Program]) -> None:
        here = cuda.architecture(self._device.index or 0)
        try:
            precompile(
                wanted, here, max(1, (os.cpu_count() or 1) - _FREE_CORES), lambda one: self._done({one})
            )
        finally:
            self._done(set(wanted))

    def _done(self, programs: set[Program]) -> None:
        with self._changed:
            self._pending -= programs
            self._changed.notify_all()


def duration(seconds: float) -> str:
    """`45 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
