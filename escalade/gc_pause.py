"""Pauses of Python's cyclic garbage collector.

With PyTorch loaded, a full collection takes 0.1 s and more, and it frees objects in whichever thread triggered it.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_active = 0  # pauses in effect, over all threads
_was_enabled = False  # before the first of them


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable garbage collection in all threads.

    For code that allocates many long-lived objects, and for code in which freeing an object would be an error.
    """
    global _active, _was_enabled
    with _lock:
        if not _active:
            _was_enabled = gc.isenabled()
            gc.disable()
        _active += 1
    try:
        yield
    finally:
        with _lock:
            _active = max(0, _active - 1)  # a child forked meanwhile has already reset it to 0
            if not _active and _was_enabled:
                gc.enable()


def _reset_after_fork() -> None:
    """End all pauses in a forked child: the threads that would end them do not exist there."""
    global _lock, _active
    _lock = threading.Lock()
    if _active and _was_enabled:
        gc.enable()
    _active = 0


os.register_at_fork(after_in_child=_reset_after_fork)
