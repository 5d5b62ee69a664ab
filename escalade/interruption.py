"""Ctrl-C: every command ends within a second, whatever it is doing.

Python raises KeyboardInterrupt in the main thread, but only once that thread is back in Python, not inside a library
call. At exit it then joins its threads, which may wait for compilers. So a watchdog thread gives the command a grace
period to clean up, then kills the process and its children.
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
GRACE_SECONDS = 0.4  # for a command to end by itself
# Longest single wait of the main thread. Some libraries install SIGINT handlers that restart the interrupted system
# call; Python raises KeyboardInterrupt only after that call returns.
POLL_SECONDS = 0.1
EXIT_STATUS = 128 + signal.SIGINT


@contextlib.contextmanager
def watch_ctrl_c() -> Iterator[None]:
    """Exit the process soon after Ctrl-C, unless SIGINT has another handler than Python's default."""
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
                time.sleep(GRACE_SECONDS)
                exit_now()


def exit_now() -> None:
    """Exit at once, without waiting for threads, and kill all child programs."""
    subprocesses.kill_all()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.write("\x1b[?25h" if stream.isatty() else "")  # progress bars hide the cursor
            stream.flush()
    os._exit(EXIT_STATUS)


def interruptible(work: Callable[[], Result]) -> Result:
    """Run a blocking library call so that Ctrl-C can interrupt the wait for it.

    In the main thread, the call runs in another thread. After an interrupt it continues and its result is dropped.
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
        thread.join(POLL_SECONDS)
    if failed:
        raise failed.pop()
    return found.pop()
