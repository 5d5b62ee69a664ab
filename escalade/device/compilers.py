"""Processes that compile for a GPU: the first of them loads NVRTC, and copies itself for every program.

NVRTC lets one thread at a time into its front end, so that threads wait for each other; processes do not. To start
Python and load NVRTC takes as long as most kernels take to compile: the first process does it once, while a model is
still being captured, and stays until no program has come for a while or whoever started it has ended.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

from escalade.device.cache import default_cache, default_directory, default_limit
from escalade.device.nvrtc import compile_program, keep, make_ready, unkept
from escalade.device.program import Program
from escalade.errors import CompileError
from escalade.first_process import FirstProcess
from escalade.interruption import interruptible

IDLE_SECONDS = 60.0
"""How long the first process stays when no program comes."""
Answer = tuple[str, bytes | None]
"""What the compiler has against a program, and machine code that the cache's folder did not take."""

_first = FirstProcess(f"{__name__}.serve", {})


def begin() -> None:
    """Starts the first process if it is not there: it gets ready while the caller goes on."""
    _first.begin()


def end() -> None:
    """Ends the processes; the next program starts them again."""
    _first.end()


def compile_all(
    programs: Sequence[Program], architecture: str, count: int, report: Callable[[Program, str], None]
) -> list[Program]:
    """Compiles programs into the cache, `count` at a time, and reports each when it is done, with the compiler's
    refusal or an empty text. Gives those that are left, if the first process cannot be started or dies.
    """
    left = dict(enumerate(programs))
    with _first.alone():
        try:
            process = _first.running()
        except OSError:
            return [*programs]
        try:
            _ask(process, programs, architecture, count)
            while left:
                answer = interruptible(lambda: _answer(process))
                if answer is None:
                    _first.end_now()
                    break
                number, message, payload = answer
                program = left.pop(number)
                if payload is not None:
                    keep(program, architecture, payload)
                report(program, message)
        except BaseException:  # nobody waits for what they compile
            _first.end_now()
            raise
    return [*left.values()]


def _ask(
    process: subprocess.Popen[bytes], programs: Sequence[Program], architecture: str, count: int
) -> None:
    # As this process understands them: a relative folder is seen from where it began.
    cache = {"ESCALADE_CACHE_DIR": str(default_directory()), "ESCALADE_CACHE_LIMIT": str(default_limit())}
    request = memoryview(pickle.dumps((tuple(programs), architecture, count, cache)))
    assert process.stdin
    with suppress(OSError):  # one that is gone gives no answer
        while request:  # past the buffer: whoever forks meanwhile would write what is left in it, too
            request = request[os.write(process.stdin.fileno(), request) :]


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
    source, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever a library prints must not get among the answers
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how the copies ended
    with suppress(CompileError):  # which every program says then
        make_ready()
    while select.select([source], [], [], IDLE_SECONDS)[0]:
        try:
            for answer in _answers(*pickle.load(source)):
                pickle.dump(answer, answers)
                answers.flush()
        except (EOFError, BrokenPipeError):  # whoever asked is gone
            return


def _answers(
    programs: Sequence[Program], architecture: str, count: int, cache: Mapping[str, str]
) -> Iterator[tuple[int, str, bytes | None]]:
    os.environ.update(cache)
    waiting = deque(enumerate(programs))
    running: dict[int, int] = {}
    while waiting or running:
        while waiting and len(running) < count:
            number, program = waiting.popleft()
            running[_begun(program, architecture)] = number
        for pipe in select.select([*running], [], [])[0]:
            number = running.pop(pipe)
            with os.fdopen(pipe, "rb") as file:
                said = file.read()
            try:
                yield number, *pickle.loads(said)
            except (EOFError, pickle.UnpicklingError):
                yield number, f"a compiler process died over {programs[number]}", None


def _begun(program: Program, architecture: str) -> int:
    """The end of a pipe that a copy of this process writes its answer to."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(writing)
        return reading
    try:
        with os.fdopen(writing, "wb") as file:
            pickle.dump(_compiled(program, architecture), file)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # at once: what the first process has loaded is not this one's to put away


def _compiled(program: Program, architecture: str) -> Answer:
    try:
        compile_program(program, architecture)
        return "", unkept(program, architecture)
    except CompileError as error:
        return str(error), None
    finally:
        default_cache().forget()
