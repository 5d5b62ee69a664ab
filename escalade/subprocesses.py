"""Other programs, run so that neither the current folder nor the environment has a say in what they do."""

from __future__ import annotations

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

# Where programs, their libraries and their temporary files are. Nothing that a compiler takes for options, include
# folders or libraries (CPATH, LIBRARY_PATH, GCC_EXEC_PREFIX, LD_PRELOAD, …), nor another language for its messages.
_KEPT = ("HOME", "TMPDIR", "TMP", "TEMP", "PATH", "LD_LIBRARY_PATH")
_START = """
import importlib, importlib.machinery, sys
folder, module, function, *rest = sys.argv[1:]
end = rest.index("--")
given, sys.argv[1:] = rest[:end], rest[end + 1 :]
standard = [entry for entry in sys.path if "-packages" not in entry]
sys.path[:] = standard + [entry for entry in [*given, *sys.path] if entry not in standard]
class Beside:
    # Our packages, from the folder that this one was found in.
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("escalade", "escalade_apps", "escalade_bench"):
            return importlib.machinery.PathFinder.find_spec(name, [folder])
sys.meta_path.insert(0, Beside)
getattr(importlib.import_module(module), function)()
"""


def environment() -> dict[str, str]:
    """What other programs get to see of this process's environment."""
    kept = {name: _absolute(os.environ[name]) for name in _KEPT if name in os.environ}
    return {"PATH": os.defpath, "LC_ALL": "C", **{name: value for name, value in kept.items() if value}}


def find(name: str) -> str | None:
    """A program on the PATH, but for entries that depend on the current folder."""
    return shutil.which(name, path=environment()["PATH"])


def run(
    command: Sequence[str | pathlib.Path],
    *,
    folder: str | None = None,
    timeout: float | None = None,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Waits for its end. A program that is not there is a FileNotFoundError."""
    name, *arguments = map(str, command)
    found = find(name)
    if found is None:
        raise FileNotFoundError(2, "there is no such program on the PATH", name)
    return _finished(
        [found, *arguments], folder=folder, timeout=timeout, variables={**environment(), **(variables or {})}
    )


def _finished(
    command: Sequence[str],
    *,
    folder: str | None = None,
    timeout: float | None = None,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Waits for the end of a program, and ends it with all that it has started if nobody waits any longer."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        cwd=folder,
        env=variables,
        process_group=0,
    )
    _started.add(process)
    try:
        output, errors = process.communicate(timeout=timeout)
    except BaseException:
        end(process)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


_started: weakref.WeakSet[subprocess.Popen[Any]] = weakref.WeakSet()
"""Programs, each the first of a process group: a compiler starts others."""


def end(process: subprocess.Popen[Any]) -> None:
    """Ends a program at once, with all that it has started."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def end_all() -> None:
    """Ends every program that was started here: the process is about to end."""
    for process in tuple(_started):
        end(process)


def output(*command: str | pathlib.Path, timeout: float | None = None) -> str:
    """What a program prints; nothing if it is not there, fails or takes too long."""
    try:
        done = run(command, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def python(function: str, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A function of this package, such as `escalade.device.compilers.serve`, in a Python of its own.

    It is this very package, wherever it lies, and its dependencies are found where this process finds them, after
    Python's own modules: no file of the current folder is imported because of its name. Its standard input is a socket,
    which takes descriptors of files too.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = subprocess.Popen(
            _python(function),
            stdin=theirs.fileno(),
            stdout=subprocess.PIPE,
            env={**os.environ, **variables},
            process_group=0,
        )
        process.stdin = os.fdopen(ours.detach(), "wb")
    _started.add(process)
    return process


def python_under(
    program: Sequence[str], function: str, arguments: Sequence[str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """A function of this package, started as `python` does, by another program that looks on: a profiler.

    The function finds the arguments in `sys.argv`.
    """
    return _finished([*program, *_python(function, arguments)], timeout=timeout)


def _python(function: str, arguments: Sequence[str] = ()) -> list[str]:
    folder = pathlib.Path(__file__).absolute().parent.parent
    module, name = function.rsplit(".", 1)
    options = ["-I", "-W", "ignore", *(["-B"] if sys.dont_write_bytecode else [])]
    start = [sys.executable, *options, "-c", _START]
    return [*start, str(folder), module, name, *_search_path(), "--", *arguments]


def _search_path() -> list[str]:
    """`sys.path` without the current folder, unless PYTHONPATH names it: Python adds it by itself."""
    asked_for = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [
        entry for entry in sys.path if os.path.isabs(entry) and (entry in asked_for or not _is_current(entry))
    ]


def _is_current(folder: str) -> bool:
    try:
        return os.path.samefile(folder, os.curdir)
    except OSError:
        return False


def _absolute(folders: str) -> str:
    """One folder or several of them, those that are the same from everywhere."""
    return os.pathsep.join(entry for entry in folders.split(os.pathsep) if os.path.isabs(entry))
