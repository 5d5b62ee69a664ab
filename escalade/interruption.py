"""Ctrl-C: a command is over within a second, whatever it is in the middle of.

Python raises KeyboardInterrupt in the main thread, as soon as that is back in Python: not while a library compiles or
computes. And before a process ends, it waits for its threads, which wait for compilers. So a thread watches: it gives a
command time to put things in order, then ends the process and all programs that it has started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from escalade import subprocesses

Result = TypeVar("Result")
GRACE = 0.4
"""Seconds that a command has to end by itself."""
AWAKE = 0.1
"""Seconds that the main thread waits at a time: where a library has set a handler after which waits go on, Ctrl-C comes
when one ends."""
STATUS = 128 + signal.SIGINT


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Inside, Ctrl-C ends the process soon, unless somebody has set another handler for it."""
    seen, told = socket.socketpair()
    told.setblocking(False)
    before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(seen,), name="escalade-interruption", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        told.close()


def _wait(seen: socket.socket) -> None:
    with seen:
        while numbers := seen.recv(64):
            if signal.SIGINT in numbers and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                time.sleep(GRACE)
                leave()


def leave() -> None:
    """Ends the process at once, with whatever it has started."""
    subprocesses.end_all()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.write("\x1b[?25h" if stream.isatty() else "")  # a bar of progress hides the cursor
            stream.flush()
    os._exit(STATUS)


def interruptible(work: Callable[[], Result]) -> Result:
    """What a call of a library gives that Ctrl-C cannot interrupt. Another thread makes it, and the main thread waits:
    if that is interrupted, the call goes on, and its result is nobody's.
    """
    if threading.current_thread() is not threading.main_thread():
        return work()
    found: list[Result] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="escalade-work", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(AWAKE)
    if failed:
        raise failed.pop()
    return found.pop()
