"""Parallel NVRTC compilation: a fork server loads NVRTC once and forks a worker per program.

NVRTC serializes its front end across threads, so threads do not help. Starting Python and loading NVRTC takes as long
as compiling most kernels: the server does it once, while a model is still being captured. It exits after
`IDLE_SECONDS` without requests, or with its parent.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import NamedTuple

from escalade.device.cache import default_cache, default_directory, default_limit
from escalade.device.nvrtc import compile_program, store_payload, unpersisted_payload, warm_up
from escalade.device.program import Program
from escalade.errors import CompileError
from escalade.fork_server import ForkServer
from escalade.interruption import interruptible

IDLE_SECONDS = 60.0
CompileResult = tuple[str, bytes | None]
"""Compiler error (empty for success), and the payload if the cache folder could not store it."""


class CompileRequest(NamedTuple):
    """Programs to compile, `max_parallel` at a time."""

    programs: tuple[Program, ...]
    architecture: str
    max_parallel: int
    cache: tuple[tuple[str, str], ...]
    """Environment variables that locate the cache."""
    wait: bool
    """True if the client waits for a result per program."""


class _CompileJob(NamedTuple):
    program: Program
    architecture: str
    cache: tuple[tuple[str, str], ...]


_server = ForkServer(f"{__name__}.serve", {})


def start() -> None:
    """Start the server in the background if it is not running."""
    _server.start()


def stop() -> None:
    """Stop all compiler processes. The next request starts them again."""
    _server.stop()


def compile_ahead(programs: Sequence[Program], architecture: str, count: int) -> None:
    """Start compiling programs in the background, `count` at a time.

    Does nothing if another thread waits for results, or if the server cannot be started.
    """
    with _server.try_exclusive() as free:
        if not free:
            return
        try:
            with suppress(OSError):
                _send(
                    _server.ensure_running(),
                    CompileRequest(tuple(programs), architecture, count, _cache(), wait=False),
                )
        except BaseException:  # the server may have received half a request
            _server.kill()
            raise


def compile_all(
    programs: Sequence[Program], architecture: str, count: int, report: Callable[[Program, str], None]
) -> list[Program]:
    """Compile programs into the cache, `count` at a time, and report each with its error message, if any.

    Returns the programs that are left if the server cannot be started or dies.
    """
    left = dict(enumerate(programs))
    with _server.exclusive():
        try:
            process = _server.ensure_running()
        except OSError:
            return [*programs]
        try:
            with suppress(OSError):  # a dead server is noticed below
                _send(process, CompileRequest(tuple(programs), architecture, count, _cache(), wait=True))
            while left:
                answer = interruptible(lambda: _receive(process))
                if answer is None:
                    _server.kill()
                    break
                number, message, payload = answer
                program = left.pop(number)
                if payload is not None:
                    store_payload(program, architecture, payload)
                report(program, message)
        except BaseException:  # do not let the workers finish results that are no longer awaited
            _server.kill()
            raise
    return [*left.values()]


def _cache() -> tuple[tuple[str, str], ...]:
    """Return the cache settings of this process, with relative folders resolved."""
    return (
        ("ESCALADE_CACHE_DIR", str(default_directory())),
        ("ESCALADE_CACHE_LIMIT", str(default_limit())),
    )


def _send(process: subprocess.Popen[bytes], request: CompileRequest) -> None:
    # Bypasses the buffer of `stdin`: a fork of this process would flush a copy of what is left in it.
    assert process.stdin
    with Connection(os.dup(process.stdin.fileno()), readable=False) as requests:
        requests.send(request)


def _receive(process: subprocess.Popen[bytes]) -> tuple[int, str, bytes | None] | None:
    """Return a program's index and its result; None if the server is dead."""
    assert process.stdout
    try:
        number, message, payload = pickle.load(process.stdout)
    except (EOFError, OSError, pickle.UnpicklingError):
        return None
    return number, message, payload


# Server side. It does not import PyTorch.


def serve() -> None:
    """Run the server: read requests, fork a worker per program, write results."""
    requests, results = Connection(os.dup(0), writable=False), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of libraries must not mix with the results
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap workers automatically
    with suppress(CompileError):  # every compilation will report it
        warm_up()
    workers = _Workers()
    with suppress(EOFError, BrokenPipeError):  # the client is gone
        while ready := wait([requests, *workers.running], None if workers.running else IDLE_SECONDS):
            for each in ready:
                if each is requests:
                    workers.submit(requests.recv())
                else:
                    assert isinstance(each, int)
                    workers.collect(each)
            for result in workers.results():
                pickle.dump(result, results)
                results.flush()


class _Workers:
    """Forked workers, one program each."""

    def __init__(self) -> None:
        self.running: dict[int, _CompileJob] = {}
        """Job of each worker, by the read end of its pipe."""
        self._max_parallel = 1
        self._pending: deque[_CompileJob] = deque()
        self._finished: dict[_CompileJob, CompileResult] = {}
        """Results that have not been sent."""
        self._awaited: dict[int, _CompileJob] = {}

    def submit(self, request: CompileRequest) -> None:
        """Queue a request. Awaited programs go before those compiled ahead."""
        jobs = tuple(
            _CompileJob(program, request.architecture, request.cache) for program in request.programs
        )
        if request.wait:
            self._awaited = dict(enumerate(jobs))
        first, then = (jobs, self._pending) if request.wait else (self._pending, jobs)
        started = {*self.running.values(), *self._finished}
        self._pending = deque(job for job in dict.fromkeys((*first, *then)) if job not in started)
        self._max_parallel = request.max_parallel
        self._start_pending()

    def collect(self, pipe: int) -> None:
        """Read the result of a worker that has ended."""
        job = self.running.pop(pipe)
        with os.fdopen(pipe, "rb") as file:
            result = file.read()
        try:
            self._finished[job] = pickle.loads(result)
        except (EOFError, pickle.UnpicklingError):
            self._finished[job] = (f"a compiler process died while compiling {job.program}", None)
        self._start_pending()

    def results(self) -> Iterator[tuple[int, str, bytes | None]]:
        """Yield finished awaited results with the program's index.

        After the last one, all results are dropped: clients find programs compiled ahead in the cache.
        """
        ready = [number for number, job in self._awaited.items() if job in self._finished]
        for number in ready:
            yield number, *self._finished[self._awaited.pop(number)]
        if ready and not self._awaited:
            self._finished.clear()

    def _start_pending(self) -> None:
        while self._pending and len(self.running) < self._max_parallel:
            job = self._pending.popleft()
            self.running[_fork_worker(job)] = job


def _fork_worker(job: _CompileJob) -> int:
    """Fork a worker; returns the read end of the pipe for its result."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        return reading
    try:
        with os.fdopen(writing, "wb") as file:
            pickle.dump(_compile(job), file)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # skip the server's exit handlers


def _compile(job: _CompileJob) -> CompileResult:
    os.environ.update(job.cache)
    try:
        compile_program(job.program, job.architecture)
        return "", unpersisted_payload(job.program, job.architecture)
    except CompileError as error:
        return str(error), None
    finally:
        default_cache().forget()
