"""Many programs at once: compiled into the cache by workers, for a GPU (which need not be there) or for the twin."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from escalade import outside
from escalade.device.cache import default_directory
from escalade.device.nvrtc import compile_program, is_compiled, keep, unkept
from escalade.device.program import Program
from escalade.errors import CompileError, ToolError

_FEW = 3  # so few that starting workers takes longer


@dataclass(frozen=True)
class Failure:
    program: Program
    message: str


def precompile(
    wanted: Sequence[Program],
    architecture: str,
    workers: int | None = None,
    done: Callable[[Program], None] = lambda program: None,
) -> list[Failure]:
    """Compiles all of `wanted` for `architecture`; what was compiled before only has to be found."""
    known = [program for program in wanted if is_compiled(program, architecture)]
    for program in known:
        done(program)
    wanted = [program for program in wanted if program not in known]
    if len(wanted) <= _FEW or workers == 1:
        return [failure for program in wanted if (failure := _one(program, architecture, done))]
    count = min(workers or os.cpu_count() or 1, len(wanted))
    with threads(count) as pool, _Workers() as processes:
        waiting = {pool.submit(processes.compile, program, architecture): program for program in wanted}
        return _gather(waiting, done)


class _Workers:
    """One process of our own for each thread that asks, none of which imports the caller's main module."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for process in self._started:
            assert process.stdin and process.stdout
            if kind is not None:  # nobody waits for what they compile
                outside.end(process)
            with suppress(OSError):
                process.stdin.close()  # which ends it
            process.wait()
            process.stdout.close()

    def compile(self, program: Program, architecture: str) -> str:
        process: subprocess.Popen[bytes] | None = getattr(self._local, "process", None)
        if process is None:
            process = self._local.process = self._start()
        assert process.stdin and process.stdout
        try:
            pickle.dump((program, architecture), process.stdin)
            process.stdin.flush()
            message, payload = pickle.load(process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            self._local.process = None
            return f"a compiler process died over {program}: {error}"
        if payload is not None:
            keep(program, architecture, payload)
        return str(message)

    def _start(self) -> subprocess.Popen[bytes]:
        # Said once more, as this process understands it: a relative one is seen from where it began.
        process = outside.python(f"{__name__}.serve", {"ESCALADE_CACHE_DIR": str(default_directory())})
        self._started.append(process)
        return process


def serve() -> None:
    """What a worker does: compiles what it is sent until there is no more. It needs no PyTorch."""
    source, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get among the answers
    while True:
        try:
            program, architecture = pickle.load(source)
        except EOFError:
            return
        message = _compile(program, architecture)
        # What the cache's folder does not take would be gone with this process.
        pickle.dump((message, None if message else unkept(program, architecture)), answers)
        answers.flush()


def _gather(waiting: Mapping[Future[str], Program], done: Callable[[Program], None]) -> list[Failure]:
    """What failed, with each one reported as it is done; an empty message is a success."""
    failures = []
    for future in as_completed(waiting):
        message = future.result()
        if message:
            failures.append(Failure(waiting[future], message))
        done(waiting[future])
    return failures


@contextmanager
def threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """So many threads, whose work is waited for; but by nobody who is interrupted. What has begun ends by itself."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    pool.shutdown()


def build_for_twin(
    wanted: Sequence[Program],
    checks: bool = False,
    workers: int | None = None,
    done: Callable[[Program], None] = lambda program: None,
    counts: bool = False,
) -> list[Failure]:
    """Builds many programs for the twin at once. Threads will do: the work is g++'s."""
    with threads(workers or os.cpu_count() or 1) as pool:
        waiting = {pool.submit(_build, program, checks, counts): program for program in wanted}
        return _gather(waiting, done)


def _build(program: Program, checks: bool, counts: bool) -> str:
    from escalade.device import twin

    try:
        twin.build(program.text(), program.entry, name=program.source, checks=checks, counts=counts)
    except ToolError:
        raise
    except CompileError as error:
        return str(error)
    return ""


def _one(program: Program, architecture: str, done: Callable[[Program], None]) -> Failure | None:
    message = _compile(program, architecture)
    done(program)
    return Failure(program, message) if message else None


def _compile(program: Program, architecture: str) -> str:
    """The compiler's refusal, or nothing: what is compiled is in the cache."""
    try:
        compile_program(program, architecture)
    except CompileError as error:
        return str(error)
    return ""
