"""Several networks at once, each in a process of its own: they are prepared side by side, and timed one at a time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pathlib
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from escalade.bench.coverage.catalogue import Entry, entries
from escalade.bench.coverage.run import Clock, Coverage
from escalade.bench.networks.workload import Say
from escalade.device import measuring_alone
from escalade.errors import EscaladeError
from escalade.measure.records import Record

_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"


@dataclass
class _Worker:
    """A process with one network, and what it has sent so far."""

    entry: Entry
    process: SpawnProcess
    records: Connection
    began: float = field(default_factory=time.monotonic)
    cases: int = 0


def measure_together(
    coverage: Coverage, networks: str, found: Sequence[Entry], jobs: int, clock: Clock, say: Say
) -> Iterator[tuple[Entry, list[Record]]]:
    """The records of networks as they come, and an empty list when one has ended; `jobs` of them are at work at once.

    A process that dies leaves a failure for what it has not measured, and the others go on.
    """
    waiting = list(found)
    running: list[_Worker] = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        try:
            while running or (waiting and clock.allows_another()):
                while waiting and len(running) < jobs and clock.allows_another():
                    running.append(_started(coverage, networks, waiting.pop(0), folder))
                    say(f"{running[-1].entry.name}: begun, with {len(running) - 1} others at work")
                for worker in _with_news(running):
                    yield from _news(coverage, worker)
                    if worker.records.closed:
                        running.remove(worker)
                        measuring_alone.leave(folder, _number(worker))
                        clock.took(time.monotonic() - worker.began)
        finally:
            for worker in running:
                worker.process.kill()  # also one that stands still
                worker.process.join()


def _started(coverage: Coverage, networks: str, entry: Entry, folder: pathlib.Path) -> _Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(
        target=_work, args=(coverage, networks, entry.name, folder, theirs), daemon=False
    )
    process.start()
    theirs.close()
    return _Worker(entry, process, ours)


def _number(worker: _Worker) -> int:
    assert worker.process.pid is not None
    return worker.process.pid


def _with_news(running: Sequence[_Worker]) -> list[_Worker]:
    ready = wait([worker.records for worker in running])
    return [worker for worker in running if worker.records in ready]


def _news(coverage: Coverage, worker: _Worker) -> Iterator[tuple[Entry, list[Record]]]:
    try:
        found = worker.records.recv()
    except (EOFError, OSError):  # it has ended, and closed its side
        worker.process.join()
        worker.records.close()
        left = coverage.cases()[worker.cases :]
        if left:
            died = EscaladeError(_death(worker.process.exitcode))
            yield worker.entry, [coverage.failed(worker.entry, *case, died) for case in left]
        yield worker.entry, []
        return
    worker.cases += len({(record.batch, record.dtype) for record in found})
    yield worker.entry, found


def _death(code: int | None) -> str:
    with contextlib.suppress(ValueError, TypeError):
        return f"its process was ended by {signal.Signals(-code).name}"  # type: ignore[operator]
    return f"its process ended with status {code}"


def _work(coverage: Coverage, networks: str, name: str, folder: pathlib.Path, records: Connection) -> None:
    """One network, in a process of its own, whose words nobody reads."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it
    os.environ.setdefault(_THREADS, "1")  # processes enough are at work
    measuring_alone.join(folder)
    (entry,) = entries(f"{networks.partition(':')[0]}:{name}")
    for found in coverage.measure(entry, lambda text: None):
        records.send(found)
    records.close()
