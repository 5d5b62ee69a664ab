"""Fork server: a Python process that imports what its workers need once, then forks a copy per job.

A fork takes about a millisecond; starting Python and importing takes hundreds.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from escalade import subprocesses
from escalade.interruption import POLL_SECONDS


class ForkServer:
    """Child process that runs a function of this package, such as `escalade.device.compilers.serve`.

    It starts on first use and ends by itself or with this process. A fork of this process starts its own.
    """

    def __init__(self, function: str, variables: Mapping[str, str]) -> None:
        self._function, self._variables = function, variables
        self._lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.inherited: list[subprocess.Popen[bytes]] = []
        os.register_at_fork(after_in_child=self._reset_after_fork)
        self._is_shut_down = False
        atexit.register(self._shut_down)

    def start(self) -> None:
        """Start the server in the background if it is not running."""
        with self.try_exclusive() as free, suppress(OSError):  # it may not be needed after all
            if free:
                self.ensure_running()

    def stop(self) -> None:
        """Kill the server and its forks. The next use starts it again."""
        with self.exclusive():
            self.kill()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Lock the server: no other thread talks to it, starts it or stops it."""
        while not self._lock.acquire(timeout=POLL_SECONDS):
            pass
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def try_exclusive(self) -> Iterator[bool]:
        """Lock the server if it is free; yields whether it is locked."""
        free = self._lock.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self._lock.release()

    def ensure_running(self) -> subprocess.Popen[bytes]:
        """Return the process, started if necessary. Call it with the lock held; raises OSError if it cannot start."""
        if self._is_shut_down:
            raise ProcessLookupError("this process is exiting and starts no others")
        if self.process is None or self.process.poll() is not None:
            self.kill()
            self.process = subprocesses.start_python(self._function, self._variables)
        return self.process

    def kill(self) -> None:
        """Kill the server at once, even in the middle of a request."""
        if self.process is not None:
            subprocesses.kill(self.process)
            self.process.wait()
            assert self.process.stdin and self.process.stdout
            self.process.stdin.close()
            self.process.stdout.close()
        self.process = None

    def _shut_down(self) -> None:
        # Daemon threads may still send requests during interpreter exit; they must not restart the server.
        self._is_shut_down = True
        self.kill()

    def _reset_after_fork(self) -> None:
        """Forget the parent's server in a forked child, which must not wait for it."""
        self._lock = threading.Lock()
        if self.process is not None:
            assert self.process.stdin
            self.process.stdin.close()
            self.process.returncode = 0  # as far as this process is concerned
            # Keep the object: a parent thread may have held stdout's lock, and closing it here would deadlock.
            self.inherited.append(self.process)
        self.process = None
