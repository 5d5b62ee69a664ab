"""Run a campaign: prepare units in parallel processes, then time them alone in one.

Most of a unit's duration is preparation: torch.compile, NVRTC, captures, references in float64. Worker processes run
every unit once, without timing anything, and so fill the caches of Inductor, Triton and NVRTC on all cores. They are
gone before the first unit is timed.
"""

from __future__ import annotations

import concurrent.futures
import faulthandler
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from escalade.terminal_text import counted, format_duration
from escalade.tune.refusal import failure_reason, require_device
from escalade_bench.campaign import registry
from escalade_bench.campaign.staleness import ALONE, BEGUN, DECLARED, SECONDS, WORKLOAD, State
from escalade_bench.campaign.units import ANY, Say, Session, Unit
from escalade_bench.measure import ceilings as card
from escalade_bench.measure.ceilings import Ceilings
from escalade_bench.measure.currency import package_digest, stamped
from escalade_bench.measure.records import Provenance, Record, now
from escalade_bench.networks.judging import UNTIMED

Keep = Callable[[Sequence[Record]], None]
"""Files records, as soon as they are made."""
Stamps = dict[tuple[str, ...], tuple[str, dict[str, str]]]
"""Digests of plan and machine code, by key of a record."""
_ALL: tuple[str, ...] = ()
"""The key of digests that all records of a unit share."""
_MOST_WORKERS = 10
_FREE_CORES = 4
_WARMING_SHARE = 0.4
"""The part of a budget that preparation may take; what is not prepared by then is prepared while it is measured."""
_PREPARED_SECONDS = 3.0
"""Seconds of one worker, beyond the timing, that preparing a unit takes on average."""
_LEAST_LIMIT, _TIMES_EXPECTED = 150.0, 5.0
"""Seconds that a unit may always take, and how many times the expected ones. What hangs must not take the time of all
that follow: the process ends with its tracebacks, and the next run measures that unit last."""
_RESERVE = 20.0
"""Seconds at the end of a budget that stay free, for a unit that takes longer than expected."""


@dataclass
class Clock:
    """The seconds that a campaign may take."""

    limit: float | None
    _began: float = field(default_factory=time.monotonic)

    @property
    def spent(self) -> float:
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        return float("inf") if self.limit is None else self.limit - self.spent

    def has_room_for(self, state: State) -> bool:
        """Return whether the unit would end in time."""
        return state.seconds <= self.left - _RESERVE

    def stamping(self, say: Say) -> Say:
        """Return a `say` that begins every line with the seconds since the start."""
        return lambda text: say(f"[{self.spent:6.1f} s] {text}")


def ordered(states: Sequence[State]) -> list[State]:
    """Return the stale units in the order of their names' list; those that ended a process come last."""
    return sorted((state for state in states if state.stale), key=lambda state: state.tried)


def run(
    stale: Sequence[State],
    session: Session,
    architecture: str,
    origin: Provenance,
    clock: Clock,
    keep: Keep,
    say: Say,
) -> list[State]:
    """Measure what there is time for, and return what is left. All that `keep` was given survives an interruption."""
    say = clock.stamping(say)
    if stale:
        say("measuring the card's ceilings")
        session.ceilings  # noqa: B018  # for all units, on none's account
    stamps = _prepared(_fitting(stale, clock), session, architecture, clock, say)
    waiting = list(stale)
    planner = Session(torch.device("cpu"))
    while chosen := next((state for state in waiting if clock.has_room_for(state)), None):
        waiting.remove(chosen)
        began = time.monotonic()
        session.reused = chosen.reused
        with _ended_after(max(_LEAST_LIMIT, _TIMES_EXPECTED * chosen.seconds)):
            _measure(
                chosen, session, planner, architecture, origin, stamps.get(chosen.unit.name, {}), keep, say
            )
        session.clear()
        planner.clear()
        left = sum(state.seconds for state in waiting)
        took = time.monotonic() - began
        say(f"{chosen.unit.name}: {took:.1f} s; {counted(len(waiting), 'unit')} left, about {duration(left)}")
    return waiting


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """End the process, with the tracebacks of all threads, if the block takes longer."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=2)  # of the process, whatever sys.stderr is
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _fitting(stale: Sequence[State], clock: Clock) -> list[State]:
    """Return the units that the budget has time for, preparation included."""
    workers = _workers()
    room, found = clock.left - _RESERVE, []
    for state in stale:
        room -= state.seconds + _PREPARED_SECONDS / workers
        if room < 0:
            break
        found.append(state)
    return found


def _workers() -> int:
    return max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) - _FREE_CORES))


def _prepared(
    states: Sequence[State], session: Session, architecture: str, clock: Clock, say: Say
) -> dict[str, Stamps]:
    """Run the units once in parallel processes; return the digests of what each runs."""
    wanted = {state.unit.name: state.reused for state in states if not state.unit.alone}
    if session.device.type != "cuda" or len(wanted) < 2:
        return {}
    workers = min(_workers(), len(wanted))
    say(f"preparing {counted(len(wanted), 'unit')} in {counted(workers, 'process')}")
    limit = None if clock.limit is None else _WARMING_SHARE * clock.left
    found: dict[str, Stamps] = {}
    with _pool(workers, session.ceilings) as pool:
        running = {pool.submit(_prepare, name, reused, architecture): name for name, reused in wanted.items()}
        try:
            for done in concurrent.futures.as_completed(running, timeout=limit):
                if done.exception() is None:
                    found[running[done]] = done.result()
                else:
                    say(f"{running[done]}: not prepared: {done.exception()}")
        except TimeoutError:
            say(f"prepared {len(found)} of {counted(len(wanted), 'unit')} in the time for it")
    return found


@contextmanager
def _pool(workers: int, ceilings: Ceilings | None) -> Iterator[concurrent.futures.ProcessPoolExecutor]:
    """Processes that are gone when the block is left, whatever they are doing."""
    pool = concurrent.futures.ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), _begin, (ceilings,)
    )
    try:
        yield pool
    finally:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


_worker: tuple[Session, Session, dict[str, Unit]] | None = None


def _begin(ceilings: Ceilings | None) -> None:
    """Prepare a worker process: one compiler thread, for there are enough processes."""
    global _worker
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    device = torch.device("cuda", torch.cuda.current_device())
    session = Session(device, seconds=UNTIMED, given_ceilings=ceilings)
    _worker = session, Session(torch.device("cpu")), registry.units()


def _prepare(name: str, reused: frozenset[str], architecture: str) -> Stamps:
    """Run one unit without timing it; return the digests of its own records."""
    assert _worker is not None
    session, planner, units = _worker
    session.reused = reused
    unit, found = units[name], {}
    with open(os.devnull, "w") as nowhere:
        untimed = unit.measure(session, lambda text: print(text, file=nowhere))
        for records in untimed if unit.prepared is None else (unit.prepared,):
            for record in records:
                own = _stamped(unit, record, planner, architecture)
                key = _ALL if record.key[:2] == ANY.key[:2] else record.key
                found[key] = own.plan, own.code
    session.clear()
    planner.clear()
    return found


def _stamped(unit: Unit, record: Record, planner: Session, architecture: str) -> Record:
    """Return the record with the digests of what ran, if it is ours and depends on kernels."""
    if record.failure:
        return replace(record, checked=package_digest())
    if record.is_peer or unit.made is None:
        return record
    made = unit.made(planner, record)
    return record if made is None else stamped(record, made, architecture)


def _measure(
    state: State,
    session: Session,
    planner: Session,
    architecture: str,
    origin: Provenance,
    stamps: Stamps,
    keep: Keep,
    say: Say,
) -> None:
    """Measure one unit: log that it was begun, file its records, and log that it has ended."""
    unit = state.unit
    here = replace(origin, command=unit.command, date=now())
    log = Record(WORKLOAD, unit.name, "", "", 0, "escalade", "")
    keep([replace(log, config={BEGUN: True, **state.known}).stamped(here)])
    began, failure = time.monotonic(), ""
    try:
        for records in unit.measure(session, say):
            kept = []
            for record in records:
                known = stamps.get(record.key, stamps.get(_ALL))
                if known and not record.is_peer and not record.failure:
                    record = replace(record, plan=known[0], code=known[1], checked=package_digest())
                else:
                    record = _stamped(unit, record, planner, architecture)
                kept.append(replace(record, case=unit.name).stamped(here))
            keep(kept)
    except Exception as error:  # any system may fail in any way: the others go on
        failure = failure_reason(error) or type(error).__name__
        say(f"{unit.name}: {failure}")
    took = {ALONE if state.reused else SECONDS: round(time.monotonic() - began, 2)}
    config = {**state.known, **took, DECLARED: list(unit.declared)}
    keep([replace(log, failure=failure, config=config).stamped(here)])
    if failure:
        require_device(session.device, f"since {unit.name} the GPU answers everything with an error")


def ceiling_records(session: Session, origin: Provenance) -> list[Record]:
    """Return the records of what the card can do, if a unit has asked."""
    if "ceilings" not in vars(session) or session.ceilings is None:
        return []
    return [record.stamped(origin) for record in card.records(session.ceilings)]


duration = format_duration
