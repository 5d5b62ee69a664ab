"""Processes that prepare side by side and measure alone.

Most of a measurement is preparation: compilers, captures, references. Several processes can share that, but not the
clock. So those of one group have a folder, in which each leaves its number; the one that measures stops the others for
as long as it does, and they go on where they were.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Iterator

from escalade.files import alone

_SETTLING_SECONDS = 0.3
"""What a stopped process has given the device to do runs to its end, and a clock that was shared comes back."""

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
            yield
        finally:
            _is_alone = False
            _signal_others(_group, signal.SIGCONT)


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
