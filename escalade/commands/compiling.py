"""Compile kernels in parallel before a command runs them, with a progress bar."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from rich.console import Console

from escalade.commands.progress import announce, progress_bar
from escalade.device import precompilation
from escalade.device.cuda import architecture
from escalade.terminal_text import counted
from escalade.tune import verification

_SECONDS_PER_JOB = {"cuda": 0.01, "cpu": 0.07}
"""Time to run and check a job. On the twin: mean of 60 jobs of conv2d on a Xeon at 2.5 GHz. On a GPU: assumed."""
_LESS = "Take less with --problem, --rung, --dtype or --layout"


def announce_jobs(
    planned: Sequence[verification.VerificationJob],
    device: torch.device,
    console: Console,
    checks: bool = False,
    counts: bool = False,
) -> None:
    """Print how many kernels are compiled and jobs are run, and about how long that takes."""
    wanted = verification.programs(planned)
    where = architecture(device.index or 0) if device.type == "cuda" else None
    new = len(precompilation.uncompiled(wanted, where, checks, counts))
    jobs = sum(not job.refusal for job in planned)
    seconds = precompilation.compile_seconds(new, where) + jobs * _SECONDS_PER_JOB[device.type]
    work = f"{counted(len(wanted), 'kernel')} ({new:,} to compile), {counted(jobs, 'result')} to check"
    announce(console, work, seconds, _LESS)


def compile_for(
    planned: Sequence[verification.VerificationJob],
    device: torch.device,
    console: Console,
    checks: bool = False,
    counts: bool = False,
) -> None:
    """Compile the kernels of the jobs. Failures are reported later, by the run."""
    if device.type == "cuda":
        compile_all(planned, architecture(device.index or 0), None, console)
        return
    wanted = verification.programs(planned)
    with progress_bar(console) as progress:
        task = progress.add_task("compiling for the twin", total=len(wanted))
        precompilation.build_for_twin(
            wanted, checks, done=lambda program: progress.advance(task), counts=counts
        )


def compile_all(
    planned: Sequence[verification.VerificationJob], arch: str, workers: int | None, console: Console
) -> list[precompilation.CompileFailure]:
    """Compile the kernels of the jobs for an architecture into the cache. Return the failures."""
    wanted = verification.programs(planned)
    began = time.perf_counter()
    with progress_bar(console) as progress:
        task = progress.add_task(f"compiling for {arch}", total=len(wanted))
        failures = precompilation.precompile(wanted, arch, workers, lambda program: progress.advance(task))
    seconds = time.perf_counter() - began
    console.print(
        f"{len(wanted) - len(failures)} of {counted(len(wanted), 'kernel')} compiled for {arch} in {seconds:.1f} s"
    )
    return failures
