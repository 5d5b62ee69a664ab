"""A Python of this package's own that makes ready once and then copies itself: to fork it takes a millisecond, where to
start Python and import what is needed takes hundreds."""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress

from escalade import subprocesses
from escalade.interruption import AWAKE


class FirstProcess:
    """One that runs a function of this package, such as `escalade.device.compilers.serve`, from when it is needed until
    it ends by itself or this process ends. A process that is forked off this one has none, and gets its own.
    """

    def __init__(self, function: str, variables: Mapping[str, str]) -> None:
        self._function, self._variables = function, variables
        self._lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.inherited: list[subprocess.Popen[bytes]] = []
        os.register_at_fork(after_in_child=self._leave_to_the_parent)
        self._is_over = False
        atexit.register(self._be_over)

    def begin(self) -> None:
        """Starts it if it is not there: it gets ready while the caller goes on."""
        with self.unless_busy() as free, suppress(OSError):  # it may not be needed after all
            if free:
                self.running()

    def end(self) -> None:
        """Ends it with its copies; it is started again when it is needed."""
        with self.alone():
            self.end_now()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Whoever asks something of it is the only one to, and nobody else starts or ends it."""
        while not self._lock.acquire(timeout=AWAKE):
            pass
        try:
            yield
        finally:
            self._lock.release()

    @contextmanager
    def unless_busy(self) -> Iterator[bool]:
        """Whether nobody else is alone with it, and then the caller is; whoever is has started it."""
        free = self._lock.acquire(blocking=False)
        try:
            yield free
        finally:
            if free:
                self._lock.release()

    def running(self) -> subprocess.Popen[bytes]:
        """The process, for whoever is alone with it; an OSError if it cannot be started."""
        if self._is_over:
            raise ProcessLookupError("nothing is started any more by a process that is about to end")
        if self.process is None or self.process.poll() is not None:
            self.end_now()
            self.process = subprocesses.python(self._function, self._variables)
        return self.process

    def end_now(self) -> None:
        """Ends it without waiting for whoever asks something of it."""
        if self.process is not None:
            subprocesses.end(self.process)
            self.process.wait()
            assert self.process.stdin and self.process.stdout
            self.process.stdin.close()
            self.process.stdout.close()
        self.process = None

    def _be_over(self) -> None:
        """A thread that is not waited for may still ask, and is not to start it again."""
        self._is_over = True
        self.end_now()

    def _leave_to_the_parent(self) -> None:
        """In a process that was forked: the first process is not its own, and must not wait for it to end."""
        self._lock = threading.Lock()
        if self.process is not None:
            assert self.process.stdin
            self.process.stdin.close()
            self.process.returncode = 0  # as far as this process is concerned
            # Kept: a thread that is not here may have been reading from it, and closing it would wait for that thread.
            self.inherited.append(self.process)
        self.process = None
