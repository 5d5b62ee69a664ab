"""Python's search for cyclic garbage, which goes through every object of the process: with PyTorch loaded, a tenth of a
second and more. It frees what it finds, in whatever thread has set it off."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_resting = 0
"""How many are in a moment without it, in all threads."""
_was_on = False
"""Whether it was on before the first of them."""


@contextmanager
def collected_later() -> Iterator[None]:
    """Nothing is searched for meanwhile, by no thread: for moments in which many objects are made, and stay, whose
    number would have Python search for garbage that they are not; and in which freeing something would be a mistake.
    """
    global _resting, _was_on
    with _lock:
        if not _resting:
            _was_on = gc.isenabled()
            gc.disable()
        _resting += 1
    try:
        yield
    finally:
        with _lock:
            _resting = max(0, _resting - 1)  # in a process that was forked meanwhile nobody is left
            if not _resting and _was_on:
                gc.enable()


def _leave_to_the_parent() -> None:
    """In a process that was forked: whoever was in such a moment is not here to end it."""
    global _lock, _resting
    _lock = threading.Lock()
    if _resting and _was_on:
        gc.enable()
    _resting = 0


os.register_at_fork(after_in_child=_leave_to_the_parent)
