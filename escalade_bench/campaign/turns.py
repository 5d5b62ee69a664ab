"""Processes that work concurrently, but use the GPU one at a time.

Most of a measurement is CPU work: tracing, compiling, planning. Several processes do it concurrently. A process that
searches among kernels, or fills the GPU, requests a turn, which the parent grants to one process at a time. While that
process times something, the parent also stops all others (SIGSTOP). A stopped process launches nothing and occupies no
core, so timings are those of a process that runs alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from escalade.device import timing

Work = Callable[..., None]
"""The main function of a process. Its first argument is a `Desk`, which yields tasks."""
_ROUND_TRIP, _QUIET, _LONGEST_DRAIN = 5e-4, 0.02, 20.0
"""In seconds: longest empty launch on an idle GPU, how long the GPU must stay idle, and the longest wait for that. Work
that stopped processes have already launched runs to completion."""
_LONG_SILENCE, _BREATH = 20.0, 0.5
"""Seconds after which stopped processes are resumed for a moment: one may hold a lock of a compiler's cache that the
timing process waits for."""
_TRACEBACKS, _TO_WRITE_THEM = signal.SIGUSR1, 2.0
"""Signal that makes a process write the tracebacks of its threads to stderr, and the seconds it gets for that."""
_PR_SET_PDEATHSIG = 1


class Note(Enum):
    """Messages from a process to its parent, apart from results."""

    READY = auto()
    TURN = auto()
    OVER = auto()
    SILENCE = auto()
    RESUME = auto()


@dataclass
class Spent:
    """Seconds that a process waited for turns, held the GPU, and ran alone."""

    waiting: float = 0.0
    on_gpu: float = 0.0
    alone: float = 0.0

    def __str__(self) -> str:
        return f"waited {self.waiting:.1f} s, had the GPU {self.on_gpu:.1f} s, ran alone {self.alone:.1f} s of these"


class Desk:
    """A process's connection to its parent: receives tasks, sends results, requests turns."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.spent = Spent()
        self._since = self._alone_since = 0.0

    def tasks(self) -> Iterator[Any]:
        """Yield tasks until there are no more."""
        self._connection.send(Note.READY)
        while (task := self._connection.recv()) is not None:
            yield task
            self._connection.send(Note.READY)

    def send(self, result: object) -> None:
        self._connection.send(result)

    def take(self) -> None:
        """Wait until no other process has a turn."""
        asked = time.monotonic()
        self._connection.send(Note.TURN)
        self._connection.recv()
        self._since = time.monotonic()
        self.spent.waiting += self._since - asked

    def give_back(self) -> None:
        try:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        finally:
            self.spent.on_gpu += time.monotonic() - self._since
            self._connection.send(Note.OVER)

    def silence(self) -> None:
        self._alone_since = time.monotonic()
        self._connection.send(Note.SILENCE)
        self._connection.recv()
        if torch.cuda.is_initialized():
            _wait_until_idle()

    def resume(self) -> None:
        self.spent.alone += time.monotonic() - self._alone_since
        self._connection.send(Note.RESUME)


def _wait_until_idle() -> None:
    """Wait until empty launches return at once: contexts that share the GPU would delay some by a time slice."""
    torch.cuda.synchronize()
    quiet_since = began = time.monotonic()
    while time.monotonic() - quiet_since < _QUIET and time.monotonic() - began < _LONGEST_DRAIN:
        launched = time.perf_counter()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        if time.perf_counter() - launched > _ROUND_TRIP:
            quiet_since = time.monotonic()


def _begin(work: Work, connection: Connection, *arguments: object) -> None:
    faulthandler.register(_TRACEBACKS, file=2)
    os.setpgrp()  # a signal then reaches compilers that it has started, too
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # never leave a process stopped
    desk = Desk(connection)
    timing.take_turns(desk)
    work(desk, *arguments)


@dataclass(eq=False)
class _Worker:
    process: BaseProcess
    connection: Connection
    task: Any = None

    def send(self, message: object) -> None:
        with contextlib.suppress(BrokenPipeError):  # it has exited, which its connection reports
            self.connection.send(message)

    def signal(self, number: int) -> None:
        pid = self.process.pid
        assert pid is not None
        with contextlib.suppress(ProcessLookupError):  # it has exited
            try:
                os.killpg(pid, number)
            except ProcessLookupError:  # it has not created its process group yet
                os.kill(pid, number)


@dataclass
class Crew:
    """Processes that run `work(desk, *arguments)`."""

    work: Work
    arguments: tuple[object, ...]
    receive: Callable[[Any], None]
    """Called with each result of a process."""
    ended: Callable[[Any, bool], None]
    """Called with each finished task, and True if its process exited before the end."""
    longest_turn: Callable[[Any], float] = lambda task: float("inf")
    """Returns the longest turn for a task in seconds; a process that exceeds it is killed."""
    _workers: list[_Worker] = field(default_factory=list)
    _turns: deque[_Worker] = field(default_factory=deque)
    """The process that holds the GPU, and those waiting for it."""
    _turn_since: float = 0.0
    _silenced_since: float | None = None

    def run(self, count: int, next_task: Callable[[], Any], seconds_left: Callable[[], float]) -> list[Any]:
        """Pass tasks to `count` processes until `next_task` returns None; return the tasks that were not finished in
        time.

        A process that exits in the middle of a task is replaced.
        """
        try:
            self._workers = [self._started() for _ in range(count)]
            while self._workers and seconds_left() > 0:
                self._let_breathe()
                self._end_hung_turn()
                # Do not read from stopped processes: a message may be incomplete.
                heard = self._workers if self._silenced_since is None else [self._turns[0]]
                ready = wait([one.connection for one in heard], timeout=min(1.0, max(0.0, seconds_left())))
                for worker in [one for one in heard if one.connection in ready]:
                    self._serve(worker, next_task)
                    if self._silenced_since is not None:
                        break
            return [one.task for one in self._workers if one.task is not None]
        finally:
            for one in self._workers:
                one.signal(signal.SIGKILL)
                one.process.join()

    def _started(self) -> _Worker:
        here, there = multiprocessing.Pipe()
        spawn = multiprocessing.get_context("spawn")
        process = spawn.Process(target=_begin, args=(self.work, there, *self.arguments), daemon=False)
        process.start()
        there.close()  # so that this process notices its exit
        return _Worker(process, here)

    def _serve(self, worker: _Worker, next_task: Callable[[], Any]) -> None:
        try:
            message = worker.connection.recv()
        except (EOFError, ConnectionResetError):
            self._lose(worker, next_task)
            return
        if message is Note.TURN:
            self._turns.append(worker)
            if self._turns[0] is worker:
                self._grant()
        elif message is Note.OVER:
            self._end_turn(worker)
        elif message is Note.SILENCE:
            self._signal_others(signal.SIGSTOP)
            self._silenced_since = time.monotonic()
            worker.send(message)
        elif message is Note.RESUME:
            self._resume()
        elif message is Note.READY:
            if worker.task is not None:
                self.ended(worker.task, False)
            worker.task = next_task()
            worker.send(worker.task)
            if worker.task is None:
                self._workers.remove(worker)
                worker.process.join()
        else:
            self.receive(message)

    def _grant(self) -> None:
        if self._turns:
            self._turn_since = time.monotonic()
            self._turns[0].send(Note.TURN)

    def _end_turn(self, worker: _Worker) -> None:
        """Remove a process from the queue for the GPU, and grant the next turn if it held the GPU."""
        had_it = bool(self._turns) and self._turns[0] is worker
        with contextlib.suppress(ValueError):
            self._turns.remove(worker)
        if had_it:
            self._resume()
            self._grant()

    def _end_hung_turn(self) -> None:
        """Kill a process that has held the GPU for too long; its connection then reports the exit."""
        if self._turns and time.monotonic() - self._turn_since > self.longest_turn(self._turns[0].task):
            self._turns[0].signal(_TRACEBACKS)
            time.sleep(_TO_WRITE_THEM)
            self._turns[0].signal(signal.SIGKILL)
            self._turn_since = float("inf")

    def _signal_others(self, number: int) -> None:
        for one in self._workers:
            if one is not self._turns[0]:
                one.signal(number)

    def _resume(self) -> None:
        if self._silenced_since is not None:
            self._silenced_since = None
            for one in self._workers:
                one.signal(signal.SIGCONT)

    def _let_breathe(self) -> None:
        if self._silenced_since is not None and time.monotonic() - self._silenced_since > _LONG_SILENCE:
            self._signal_others(signal.SIGCONT)
            time.sleep(_BREATH)
            self._signal_others(signal.SIGSTOP)
            self._silenced_since = time.monotonic()

    def _lose(self, worker: _Worker, next_task: Callable[[], Any]) -> None:
        """Report the task of a process that has exited, and start another process for the remaining tasks."""
        self._workers.remove(worker)
        self._end_turn(worker)
        worker.process.join()
        if worker.task is not None:
            self.ended(worker.task, True)
            self._workers.append(self._started())
