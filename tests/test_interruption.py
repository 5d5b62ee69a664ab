"""Ctrl-C: commands end within a second, and so do their child processes."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

import pytest

from escalade import interruption
from escalade.device.precompilation import thread_pool
from escalade.interruption import EXIT_STATUS, interruptible
from tests import fresh

LONGEST = 60
"""Seconds until a hanging test fails. None passes by waiting for it."""
DEAF = """
import sys, threading, time
from escalade import interruption, subprocesses
with interruption.watch_ctrl_c():
    compiler = ["sh", "-c", "echo $$ > " + sys.argv[1] + "; sleep 61 & sleep 61"]
    threads = [threading.Thread(target=subprocesses.run, args=(compiler,))]
    while True:
        try:
            if threads:
                threads.pop().start()  # inside of `try`: Ctrl-C may come as soon as it runs
            time.sleep(60)
        except KeyboardInterrupt:
            pass
"""


def test_a_command_that_does_not_hear_is_ended_with_its_compilers(tmp_path: pathlib.Path) -> None:
    told = tmp_path / "group"
    process = subprocess.Popen([sys.executable, "-c", DEAF, told])
    while not told.exists() or not told.read_text():
        assert process.poll() is None  # a failing script must not hang the test
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.wait(LONGEST) == EXIT_STATUS
    with pytest.raises(ProcessLookupError):
        while True:  # killed processes disappear once they are reaped
            os.killpg(int(told.read_text()), 0)
            time.sleep(0.02)


BACKGROUND = """
import sys
from escalade import interruption
with interruption.watch_ctrl_c():
    print("ready", flush=True)
    print(sys.stdin.read())
"""


def test_a_command_started_with_ctrl_c_ignored_keeps_running() -> None:
    """As for background jobs of a shell."""
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", sys.executable, "-c", BACKGROUND]
    process = subprocess.Popen(ignoring, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate("done")
    assert (process.returncode, said) == (0, "done\n")


IGNORED = """
import signal, sys
import pytest
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.exit(pytest.main(["-p", "no:cacheprovider", sys.argv[1]]))
"""


def test_tests_in_the_background_hear_ctrl_c() -> None:
    test = test_a_call_that_cannot_be_interrupted_is_not_waited_for
    done = fresh.python("-c", IGNORED, f"{__file__}::{test.__name__}")
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr


def interrupt() -> None:
    """Raise like Ctrl-C, from any thread."""
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)


def wait(future: Future[bool]) -> None:
    """Sleep in short steps: a longer one would continue after a handler that a library has set."""
    until = time.monotonic() + LONGEST
    while not future.done() and time.monotonic() < until:
        time.sleep(interruption.POLL_SECONDS)


def test_no_watcher_outlives_a_command() -> None:
    before = signal.set_wakeup_fd(-1)
    with interruption.watch_ctrl_c():
        inside = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(inside)
    assert inside != -1
    assert signal.set_wakeup_fd(before) == -1
    with pytest.raises(KeyboardInterrupt):
        threading.Timer(0.1, interrupt).start()
        wait(Future())
    time.sleep(interruption.GRACE_SECONDS + 0.1)  # a leaked watcher would have ended the process


def test_a_call_that_cannot_be_interrupted_is_not_waited_for() -> None:
    assert interruptible(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 / 0)
    end = threading.Event()

    def interrupted() -> bool:
        interrupt()
        return end.wait(LONGEST)

    with pytest.raises(KeyboardInterrupt):
        interruptible(interrupted)
    end.set()


def test_an_interrupted_caller_waits_for_no_thread() -> None:
    end, both = threading.Event(), threading.Event()
    waiting: list[Future[bool]] = []

    def interrupted() -> bool:
        both.wait(LONGEST)
        interrupt()
        return end.wait(LONGEST)

    with pytest.raises(KeyboardInterrupt), thread_pool(1) as pool:
        waiting += [pool.submit(interrupted), pool.submit(end.wait, LONGEST)]
        both.set()
        wait(waiting[0])
    assert not waiting[0].done() and waiting[1].cancelled()
    end.set()
