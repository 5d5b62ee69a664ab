"""Processes that compile for a GPU: the first of them loads NVRTC, and copies itself for every program.

NVRTC lets one thread at a time into its front end, so that threads wait for each other; processes do not. To start
Python and load NVRTC takes as long as most kernels take to compile: the first process does it once, while a model is
still being captured, and stays until no program has come for a while or whoever started it has ended.
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
"""How long the first process stays when no program comes."""
Answer = tuple[str, bytes | None]
"""What the compiler has against a program, and machine code that the cache's folder did not take."""


class CompileRequest(NamedTuple):
    """Programs to be compiled, so many at a time."""

    programs: tuple[Program, ...]
    architecture: str
    max_parallel: int
    cache: tuple[tuple[str, str], ...]
    """Variables that say where to keep them."""
    wait: bool
    """Whether somebody waits for an answer for each of them."""


class _Job(NamedTuple):
    program: Program
    architecture: str
    cache: tuple[tuple[str, str], ...]


_server = ForkServer(f"{__name__}.serve", {})


def start() -> None:
    """Starts the first process if it is not there: it gets ready while the caller goes on."""
    _server.start()


def stop() -> None:
    """Ends the processes; the next program starts them again."""
    _server.stop()


def compile_ahead(programs: Sequence[Program], architecture: str, count: int) -> None:
    """Has programs compiled that somebody is going to want, `count` at a time, and waits for none of them. While others
    are waited for, or where the first process cannot be started, they are left to who wants them."""
    with _server.try_exclusive() as free:
        if not free:
            return
        try:
            with suppress(OSError):
                _ask(
                    _server.ensure_running(),
                    CompileRequest(tuple(programs), architecture, count, _cache(), wait=False),
                )
        except BaseException:  # half a request is none
            _server.kill()
            raise


def compile_all(
    programs: Sequence[Program], architecture: str, count: int, report: Callable[[Program, str], None]
) -> list[Program]:
    """Compiles programs into the cache, `count` at a time, and reports each when it is done, with the compiler's
    refusal or an empty text. Gives those that are left, if the first process cannot be started or dies.
    """
    left = dict(enumerate(programs))
    with _server.exclusive():
        try:
            process = _server.ensure_running()
        except OSError:
            return [*programs]
        try:
            with suppress(OSError):  # one that is gone gives no answer
                _ask(process, CompileRequest(tuple(programs), architecture, count, _cache(), wait=True))
            while left:
                answer = interruptible(lambda: _answer(process))
                if answer is None:
                    _server.kill()
                    break
                number, message, payload = answer
                program = left.pop(number)
                if payload is not None:
                    store_payload(program, architecture, payload)
                report(program, message)
        except BaseException:  # nobody waits for what they compile
            _server.kill()
            raise
    return [*left.values()]


def _cache() -> tuple[tuple[str, str], ...]:
    """Where this process keeps what is compiled, as it understands it: a relative folder is seen from where it
    began."""
    return (
        ("ESCALADE_CACHE_DIR", str(default_directory())),
        ("ESCALADE_CACHE_LIMIT", str(default_limit())),
    )


def _ask(process: subprocess.Popen[bytes], request: CompileRequest) -> None:
    """Past the buffer of `stdin`: whoever forks meanwhile would write what is left in it, too."""
    assert process.stdin
    with Connection(os.dup(process.stdin.fileno()), readable=False) as requests:
        requests.send(request)


def _answer(process: subprocess.Popen[bytes]) -> tuple[int, str, bytes | None] | None:
    """A program's number with what is said of it; None if the process is gone."""
    assert process.stdout
    try:
        number, message, payload = pickle.load(process.stdout)
    except (EOFError, OSError, pickle.UnpicklingError):
        return None
    return number, message, payload


# What the processes do. They need no PyTorch.


def serve() -> None:
    """The first process: copies itself for every program that it is sent."""
    requests, answers = Connection(os.dup(0), writable=False), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get among the answers
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how the copies ended
    with suppress(CompileError):  # which every program says then
        warm_up()
    copies = _Copies()
    with suppress(EOFError, BrokenPipeError):  # whoever asked is gone
        while ready := wait([requests, *copies.at_work], None if copies.at_work else IDLE_SECONDS):
            for each in ready:
                if each is requests:
                    copies.take(requests.recv())
                else:
                    assert isinstance(each, int)
                    copies.hear(each)
            for answer in copies.answers():
                pickle.dump(answer, answers)
                answers.flush()


class _Copies:
    """Copies of the first process, each at work on one program."""

    def __init__(self) -> None:
        self.at_work: dict[int, _Job] = {}
        """What each is at, by the end of the pipe that it writes to."""
        self._at_once = 1
        self._waiting: deque[_Job] = deque()
        self._said: dict[_Job, Answer] = {}
        """What nobody has asked for yet."""
        self._awaited: dict[int, _Job] = {}

    def take(self, request: CompileRequest) -> None:
        """What somebody waits for comes before what was begun ahead."""
        jobs = tuple(_Job(program, request.architecture, request.cache) for program in request.programs)
        if request.wait:
            self._awaited = dict(enumerate(jobs))
        first, then = (jobs, self._waiting) if request.wait else (self._waiting, jobs)
        begun = {*self.at_work.values(), *self._said}
        self._waiting = deque(job for job in dict.fromkeys((*first, *then)) if job not in begun)
        self._at_once = request.max_parallel
        self._go_on()

    def hear(self, pipe: int) -> None:
        """What a copy says, which ends with it."""
        job = self.at_work.pop(pipe)
        with os.fdopen(pipe, "rb") as file:
            said = file.read()
        try:
            self._said[job] = pickle.loads(said)
        except (EOFError, pickle.UnpicklingError):
            self._said[job] = (f"a compiler process died over {job.program}", None)
        self._go_on()

    def answers(self) -> Iterator[tuple[int, str, bytes | None]]:
        """What is there for whoever waits, by the number of the program. When they have all, nothing is kept: what was
        begun ahead and is done is found in the cache, and not asked for."""
        there = [number for number, job in self._awaited.items() if job in self._said]
        for number in there:
            yield number, *self._said[self._awaited.pop(number)]
        if there and not self._awaited:
            self._said.clear()

    def _go_on(self) -> None:
        while self._waiting and len(self.at_work) < self._at_once:
            job = self._waiting.popleft()
            self.at_work[_begun(job)] = job


def _begun(job: _Job) -> int:
    """The end of a pipe that a copy of this process writes its answer to."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        return reading
    try:
        with os.fdopen(writing, "wb") as file:
            pickle.dump(_compiled(job), file)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # at once: what the first process has loaded is not this one's to put away


def _compiled(job: _Job) -> Answer:
    os.environ.update(job.cache)
    try:
        compile_program(job.program, job.architecture)
        return "", unpersisted_payload(job.program, job.architecture)
    except CompileError as error:
        return str(error), None
    finally:
        default_cache().forget()
