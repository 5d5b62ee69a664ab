"""Many programs at once: compiled into the cache by workers, for a GPU (which need not be there) or for the twin."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import TYPE_CHECKING

from escalade.device.nvrtc import compile_program
from escalade.device.program import Program
from escalade.errors import CompileError

if TYPE_CHECKING:  # workers import this module, and need no PyTorch
    from escalade.bench.verify import Job

_FEW = 3  # so few that starting workers takes longer


@dataclass(frozen=True)
class Failure:
    program: Program
    message: str


def programs(planned: Iterable[Job], architecture: str | None = None) -> list[Program]:
    """What these jobs compile (for this architecture), each once. A rung that raises is left for the run to report."""
    found: dict[Program, None] = {}
    for job in planned:
        if job.config is None or (architecture and architecture not in job.rung.architectures):
            continue
        try:
            recipe = job.rung.recipe(job.problem, job.config)
        except Exception:
            continue
        found.update(dict.fromkeys(recipe.programs))
    return list(found)


def precompile(
    wanted: Sequence[Program],
    architecture: str,
    workers: int | None = None,
    done: Callable[[Program], None] = lambda program: None,
) -> list[Failure]:
    """Compiles all of `wanted` for `architecture`; what was compiled before only has to be found."""
    if len(wanted) <= _FEW or workers == 1:
        return [failure for program in wanted if (failure := _one(program, architecture, done))]
    count = min(workers or os.cpu_count() or 1, len(wanted))
    context = multiprocessing.get_context("spawn")  # a fork of a process that uses CUDA is broken
    with ProcessPoolExecutor(count, mp_context=context) as pool:
        waiting = {pool.submit(_compile, program, architecture): program for program in wanted}
        return _gather(waiting, done)


def _gather(waiting: Mapping[Future[str], Program], done: Callable[[Program], None]) -> list[Failure]:
    """What failed, with each one reported as it is done; an empty message is a success."""
    failures = []
    for future in as_completed(waiting):
        message = future.result()
        if message:
            failures.append(Failure(waiting[future], message))
        done(waiting[future])
    return failures


def build_for_twin(
    wanted: Sequence[Program],
    checks: bool = False,
    workers: int | None = None,
    done: Callable[[Program], None] = lambda program: None,
) -> list[Failure]:
    """The same for the twin. Threads will do: the work is g++'s."""
    with ThreadPoolExecutor(workers or os.cpu_count() or 1) as pool:
        waiting = {pool.submit(_build, program, checks): program for program in wanted}
        return _gather(waiting, done)


def _build(program: Program, checks: bool) -> str:
    from escalade.device import twin

    try:
        twin.build(program.text(), program.entry, name=program.source, checks=checks)
    except CompileError as error:
        return str(error)
    return ""


def _one(program: Program, architecture: str, done: Callable[[Program], None]) -> Failure | None:
    message = _compile(program, architecture)
    done(program)
    return Failure(program, message) if message else None


def _compile(program: Program, architecture: str) -> str:
    """The compiler's refusal, or nothing: bytes need not travel back, they are in the cache."""
    try:
        compile_program(program, architecture)
    except CompileError as error:
        return str(error)
    return ""
