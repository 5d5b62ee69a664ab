"""Run a campaign: several processes measure units at the same time, and take turns where they time something.

Most of a unit's duration is work for the CPU: torch.compile, NVRTC, planning, captures, references.
"""

from __future__ import annotations

import faulthandler
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from escalade.device.timing import exclusive
from escalade.terminal_text import counted, format_duration
from escalade.tune.refusal import failure_reason, require_device
from escalade_bench.campaign import registry
from escalade_bench.campaign.staleness import ALONE, BEGUN, DECLARED, SECONDS, WORKLOAD, State
from escalade_bench.campaign.turns import Crew, Desk, Spent
from escalade_bench.campaign.units import Say, Session, Unit
from escalade_bench.measure import ceilings as card
from escalade_bench.measure.ceilings import Ceilings
from escalade_bench.measure.currency import package_digest, stamped
from escalade_bench.measure.records import Provenance, Record, now

_MOST_WORKERS = 12
_FREE_CORES = 4
_LEAST_LIMIT, _TIMES_EXPECTED = 600.0, 5.0
"""Time limit of a unit, including other processes' turns: fixed seconds, and a factor on the expected duration. A
hanging unit must not use up the budget: its process is ended with tracebacks, and the next run measures the unit
last."""
_TIMES_SLOWER = 3.0
"""Slowdown of a unit with the maximum number of processes, all waiting for turns."""
_LONGEST_TURN = 60.0
"""Longest turn of a process in seconds, in addition to several times the expected duration of its unit. A process that
exceeds it is considered hung and killed."""
_RESERVE = 20.0
"""Seconds kept free at the end of a budget, for a unit that takes longer than expected."""


@dataclass
class Clock:
    """Time budget of a campaign, in seconds."""

    limit: float | None
    _began: float = field(default_factory=time.monotonic)

    @property
    def spent(self) -> float:
        return time.monotonic() - self._began

    @property
    def left(self) -> float:
        return float("inf") if self.limit is None else self.limit - self.spent

    def has_room_for(self, state: State, times: float = 1.0) -> bool:
        """Return True if the unit ends in time even if it takes `times` its expected duration."""
        return times * state.seconds <= self.left - _RESERVE

    def stamping(self, say: Say) -> Say:
        """Return a `say` that begins every line with the seconds since the start."""
        return lambda text: say(f"[{self.spent:6.1f} s] {text}")


def ordered(states: Sequence[State]) -> list[State]:
    """Return the stale units in the order of their names' list; those that ended a process come last."""
    return sorted((state for state in states if state.stale), key=lambda state: state.tried)


def workers_for(states: Sequence[State]) -> int:
    """Return how many processes measure these units."""
    return max(1, min(_MOST_WORKERS, (os.cpu_count() or 1) - _FREE_CORES, len(states)))


def expected_seconds(states: Sequence[State], workers: int = _MOST_WORKERS) -> float:
    """Return the expected duration of the units: those that run alone one by one, the others side by side."""
    alone = sum(state.seconds for state in states if state.unit.alone)
    return alone + sum(state.seconds for state in states if not state.unit.alone) / max(1, workers)


@dataclass
class Campaign:
    """Measures units on one card, in this process or several. Records passed to `keep` survive an interruption."""

    session: Session
    architecture: str
    origin: Provenance
    keep: Callable[[Sequence[Record]], None]
    """Files records, as soon as they are made."""
    say: Say
    planner: Session = field(default_factory=lambda: Session(torch.device("cpu")))

    def run(self, stale: Sequence[State], clock: Clock) -> list[State]:
        """Measure as many units as the budget allows, and return the rest."""
        self.say = clock.stamping(self.say)
        if stale:
            self.say("measuring the card's ceilings")
            self.session.ceilings  # noqa: B018  # shared by all units, so not charged to one
        waiting = sorted(stale, key=lambda state: state.unit.alone)  # these block all other units
        workers = workers_for(stale) if self.session.device.type == "cuda" else 0
        times = 1 + (_TIMES_SLOWER - 1) * max(0, workers - 1) / (_MOST_WORKERS - 1)
        running: dict[str, tuple[State, float]] = {}
        crowded: list[State] = []

        def next_task() -> _Task | None:
            state = next((state for state in waiting if clock.has_room_for(state, times)), None)
            if state is None:
                return None
            waiting.remove(state)
            running[state.unit.name] = state, time.monotonic()
            return _Task(state.unit.name, state.seconds, state.reused, dict(state.known))

        def ended(task: _Task, lost: bool = False) -> None:
            _, began = running.pop(task.name)
            if lost:
                self.say(f"{task.name}: its process has exited")
            left = (
                f"{counted(len(waiting), 'unit')} left, about {duration(expected_seconds(waiting, workers))}"
            )
            self.say(f"{task.name}: {time.monotonic() - began:.1f} s; {left}")

        def receive(message: str | list[Record] | _Crowded) -> None:
            if isinstance(message, _Crowded):
                crowded.append(running[message.name][0])
            else:
                self.say(message) if isinstance(message, str) else self.keep(message)

        if workers <= 1:
            while task := next_task():
                try:
                    self.measure(running[task.name][0])
                except torch.OutOfMemoryError:
                    receive(_Crowded(task.name))
                ended(task)
            return [*crowded, *waiting]
        self.say(f"measuring in {counted(workers, 'process')}")
        own = self.session
        given = own.device, own.seconds, own.seed, own.ceilings, self.architecture, self.origin
        crew = Crew(_work, given, receive, ended, lambda task: _LONGEST_TURN + _TIMES_SLOWER * task.seconds)
        cut = crew.run(workers, next_task, lambda: clock.left)
        waiting, crowded, times = [*crowded, *waiting], [], 1.0
        if not cut and waiting:  # the other processes have freed their memory
            cut = crew.run(1, next_task, lambda: clock.left)
        # the budget ran out, the units did not fail
        self.keep([replace(_log(task.name), config=task.known).stamped(self.origin) for task in cut])
        return [*(running[task.name][0] for task in cut), *crowded, *waiting]

    def measure(self, state: State) -> None:
        """Measure one unit, then free what it cached."""
        self.session.reused = state.reused
        with (
            exclusive() if state.unit.alone else nullcontext(),
            _ended_after(max(_LEAST_LIMIT, _TIMES_EXPECTED * state.seconds)),
        ):
            self._measure(state)
        self.session.clear()
        self.planner.clear()

    def _measure(self, state: State) -> None:
        """Log that a unit was begun, file its records, and log that it has ended."""
        unit = state.unit
        here = replace(self.origin, command=unit.command, date=now())
        log = _log(unit.name)
        self.keep([replace(log, config={BEGUN: True, **state.known}).stamped(here)])
        began, failure = time.process_time(), ""  # excludes other processes' turns
        try:
            for records in unit.measure(self.session, self.say):
                own = map(partial(self._digested, unit), records)
                self.keep([replace(record, case=unit.name).stamped(here) for record in own])
        except Exception as error:  # a system may fail in any way: continue with the others
            failure = failure_reason(error) or type(error).__name__
            self.say(f"{unit.name}: {failure}")
        took = {ALONE if state.reused else SECONDS: round(time.process_time() - began, 2)}
        config = {**state.known, **took, DECLARED: list(unit.declared)}
        checked = package_digest() if failure else ""
        self.keep([replace(log, failure=failure, config=config, checked=checked).stamped(here)])
        if failure:
            require_device(self.session.device, f"since {unit.name} the GPU answers everything with an error")

    def _digested(self, unit: Unit, record: Record) -> Record:
        """Return the record with the digests of plan and kernels, if it is ours and depends on kernels."""
        if record.failure:
            return replace(record, checked=package_digest())
        made = None if record.is_peer or unit.made is None else unit.made(self.planner, record)
        return record if made is None else stamped(record, made, self.architecture)


@dataclass(frozen=True)
class _Task:
    """A unit to measure, in a form that can be sent to a process."""

    name: str
    seconds: float
    reused: frozenset[str]
    known: Mapping[str, Any]


@dataclass(frozen=True)
class _Crowded:
    """A unit that found too little memory beside other processes, and is measured again without them."""

    name: str


def _work(
    desk: Desk,
    device: torch.device,
    seconds: float,
    seed: int,
    ceilings: Ceilings | None,
    architecture: str,
    origin: Provenance,
) -> None:
    """Measure units in a separate process, with one compiler thread: other processes use the other cores."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    torch.cuda.set_device(device)
    campaign = Campaign(Session(device, seconds, seed, ceilings), architecture, origin, desk.send, desk.send)
    units = registry.units()
    for task in desk.tasks():
        desk.spent = Spent()
        try:
            campaign.measure(State(units[task.name], "", task.seconds, reused=task.reused, known=task.known))
        except torch.OutOfMemoryError:  # of memory that others hold, or it would be the unit's failure
            desk.send(_Crowded(task.name))
        desk.send(f"{task.name}: {desk.spent}")
        torch.cuda.empty_cache()


@contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """End the process, with the tracebacks of all threads, if the block takes longer."""
    faulthandler.dump_traceback_later(
        seconds, exit=True, file=2
    )  # of the process, even if sys.stderr was replaced
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _log(name: str) -> Record:
    """Return the record of how a unit's last run ended."""
    return Record(WORKLOAD, name, "", "", 0, "escalade", "")


def ceiling_records(session: Session, origin: Provenance) -> list[Record]:
    """Return the records of the card's ceilings, if a unit has measured them."""
    if "ceilings" not in vars(session) or session.ceilings is None:
        return []
    return [record.stamped(origin) for record in card.records(session.ceilings)]


duration = format_duration
