"""Parallel compilation of many programs into the cache, for a GPU (which need not be present) or for the twin."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass

from escalade.device import compilers, twin
from escalade.device.nvrtc import compile_program, is_compiled
from escalade.device.program import Program
from escalade.device.sources import read
from escalade.device.twin.building import is_built
from escalade.errors import CompileError, ToolError

_TWIN_SECONDS, _NVRTC_SECONDS = 1.0, 2.0
"""Time of a core to compile a kernel: means of 20 and 14 conv2d kernels, on two busy cores of a Xeon at 2.5 GHz."""


@dataclass(frozen=True)
class CompileFailure:
    program: Program
    message: str


def precompile(
    wanted: Sequence[Program],
    architecture: str,
    workers: int | None = None,
    done: Callable[[Program], None] = lambda program: None,
    ready: Callable[[Program], object] = lambda program: None,
) -> list[CompileFailure]:
    """Compile programs for `architecture` unless the cache has them, the largest first for load balancing.

    Calls `done` for every program, and `ready` for each new one; `ready` overlaps with the compilation of the others.
    """
    left: list[Program] = []
    for program in wanted:
        if is_compiled(program, architecture):
            done(program)
        else:
            left.append(program)
    left.sort(key=_source_length, reverse=True)
    failures: list[CompileFailure] = []

    def report(program: Program, message: str) -> None:
        if message:
            failures.append(CompileFailure(program, message))
        else:
            ready(program)
        done(program)

    count = min(workers or os.cpu_count() or 1, len(left))
    if count > 1:
        left = compilers.compile_all(left, architecture, count, report)
    for program in left:
        report(program, _compile(program, architecture))
    return failures


def uncompiled(
    programs: Iterable[Program], architecture: str | None, checks: bool = False, counts: bool = False
) -> list[Program]:
    """Return the programs that the cache does not have, for an architecture or for the twin (None)."""
    if architecture is not None:
        return [program for program in programs if not is_compiled(program, architecture)]
    return [
        program
        for program in programs
        if not is_built(program.text(), program.entry, program.source, checks, counts)
    ]


def compile_seconds(count: int, architecture: str | None) -> float:
    """Estimate how long compiling this many kernels takes on all cores, for an architecture or for the twin (None)."""
    return count * (_TWIN_SECONDS if architecture is None else _NVRTC_SECONDS) / (os.cpu_count() or 1)


def _source_length(program: Program) -> int:
    """Return the characters of source and headers, to which the compile time is roughly proportional."""
    return len(program.text()) + sum(len(read(header)) for header in program.headers())


def warm_up_compilers() -> None:
    """Start the compiler processes ahead of the first request."""
    if (os.cpu_count() or 1) > 1:
        compilers.start()


class CompileAhead:
    """Compiles programs in the background that `precompile` will need later."""

    def __init__(self, architecture: str) -> None:
        self._architecture = architecture
        self._seen: set[Program] = set()
        warm_up_compilers()

    def add(self, programs: Iterable[Program]) -> None:
        new = [program for program in dict.fromkeys(programs) if program not in self._seen]
        self._seen.update(new)
        absent = [program for program in new if not is_compiled(program, self._architecture)]
        cores = os.cpu_count() or 1
        if absent and cores > 1:
            compilers.compile_ahead(absent, self._architecture, cores)


@contextmanager
def thread_pool(count: int) -> Iterator[ThreadPoolExecutor]:
    """Thread pool that is joined at the end, except after an exception such as an interrupt."""
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
    done: Callable[[Program], None] = lambda program: None,
    counts: bool = False,
) -> None:
    """Build programs for the twin in parallel. Threads suffice, because g++ does the work."""

    def build(program: Program) -> Program:
        try:
            twin.build(program.text(), program.entry, name=program.source, checks=checks, counts=counts)
        except ToolError:
            raise
        except CompileError:
            pass  # raised again by the launch that needs the program
        return program

    with thread_pool(os.cpu_count() or 1) as pool:
        for future in as_completed([pool.submit(build, program) for program in wanted]):
            done(future.result())


def _compile(program: Program, architecture: str) -> str:
    """Compile into the cache; returns the error message, if any."""
    try:
        compile_program(program, architecture)
    except CompileError as error:
        return str(error)
    return ""
