"""Processes that prepare side by side and measure alone.

Most of a measurement is preparation: compilers, captures, references. Several processes can share that, but not the
clock. So those of one group have a folder, in which each leaves its number; the one that measures stops the others for
as long as it does, and they go on where they were.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import pathlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from escalade.files import alone

_SETTLING_SECONDS = 0.3
"""A clock that was shared comes back."""
_QUIET_SECONDS = 20.0
"""How long to wait at most for what stopped processes have given the device to do, such as a reference in float64."""
_PROBES, _PROBE_CYCLES = 40, 1_000_000
"""Some 20 ms together: several turns of processes that share the device."""

_MOST_SLOWER = 1.3

_TURN = "turn"

_group: pathlib.Path | None = None
_is_alone = False


def join(folder: pathlib.Path) -> None:
    """This process measures in turns with the others of the same folder; it waits for one that measures now."""
    global _group
    with alone(folder / _TURN):
        (folder / str(os.getpid())).touch()
    _group = folder


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """All others of the group stand still. A process that has joined none need not wait for anybody."""
    global _is_alone
    if _group is None or _is_alone:
        yield
        return
    with alone(_group / _TURN):
        _is_alone = True
        try:
            _signal_others(_group, signal.SIGSTOP)
            time.sleep(_SETTLING_SECONDS)
            if torch.cuda.is_initialized():
                wait_until_quiet(_probe)
            yield
        finally:
            _is_alone = False
            _signal_others(_group, signal.SIGCONT)


def wait_until_quiet(probe: Callable[[], Sequence[float]]) -> None:
    """Stopped processes have queues on the device, which takes no notice of their being stopped.

    Waits until work whose times `probe` gives takes no longer at any time than at its best: nobody else has a turn.
    """
    least, end = math.inf, time.monotonic() + _QUIET_SECONDS
    while time.monotonic() < end:
        times = probe()
        least = min(least, *times)
        if max(times) < _MOST_SLOWER * least:
            return


def _probe() -> list[float]:
    """Milliseconds of kernels that all do the same, one behind the other."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(_PROBES + 1)]
    for mark in marks:
        torch.cuda._sleep(_PROBE_CYCLES)
        mark.record()
    torch.cuda.synchronize()
    return [one.elapsed_time(other) for one, other in itertools.pairwise(marks)]


def leave(folder: pathlib.Path, process: int) -> None:
    """A process of the group has ended, however it did: whom it has stopped goes on."""
    (folder / str(process)).unlink(missing_ok=True)
    _signal_others(folder, signal.SIGCONT)


def _signal_others(folder: pathlib.Path, number: signal.Signals) -> None:
    for process in _members(folder) - {os.getpid()}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _members(folder: pathlib.Path) -> set[int]:
    return {int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()}
