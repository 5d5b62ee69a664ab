"""Child programs that run independently of the current folder and of most environment variables."""

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

# Variables that locate programs, libraries and temporary files. Excluded is everything that a compiler reads as
# options, include folders or libraries (CPATH, LIBRARY_PATH, GCC_EXEC_PREFIX, LD_PRELOAD, …), and the locale.
_PASSED_VARIABLES = ("HOME", "TMPDIR", "TMP", "TEMP", "PATH", "LD_LIBRARY_PATH")
_START = """
import importlib, importlib.machinery, sys
folder, module, function, *rest = sys.argv[1:]
end = rest.index("--")
given, sys.argv[1:] = rest[:end], rest[end + 1 :]
standard = [entry for entry in sys.path if "-packages" not in entry]
sys.path[:] = standard + [entry for entry in [*given, *sys.path] if entry not in standard]
class OurPackages:
    # Import our packages from the folder of the running one.
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("escalade", "escalade_apps", "escalade_bench"):
            return importlib.machinery.PathFinder.find_spec(name, [folder])
sys.meta_path.insert(0, OurPackages)
getattr(importlib.import_module(module), function)()
"""


def environment() -> dict[str, str]:
    """Return the part of this process's environment that child programs get."""
    passed = {name: _absolute(os.environ[name]) for name in _PASSED_VARIABLES if name in os.environ}
    return {"PATH": os.defpath, "LC_ALL": "C", **{name: value for name, value in passed.items() if value}}


def find_program(name: str) -> str | None:
    """Find a program on the PATH, ignoring relative entries."""
    return shutil.which(name, path=environment()["PATH"])


def run(
    command: Sequence[str | pathlib.Path],
    *,
    folder: str | None = None,
    timeout: float | None = None,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program and wait for it. Raises FileNotFoundError if it is not on the PATH."""
    name, *arguments = map(str, command)
    found = find_program(name)
    if found is None:
        raise FileNotFoundError(2, "not found on the PATH", name)
    return _run_to_end(
        [found, *arguments], folder=folder, timeout=timeout, variables={**environment(), **(variables or {})}
    )


def _run_to_end(
    command: Sequence[str],
    *,
    folder: str | None = None,
    timeout: float | None = None,
    variables: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program and wait for it; on a timeout or an interrupt, kill it with its children."""
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
        kill(process)
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, output, errors)


_started: weakref.WeakSet[subprocess.Popen[Any]] = weakref.WeakSet()
"""Running programs. Each leads a process group, because compilers start further processes."""


def kill(process: subprocess.Popen[Any]) -> None:
    """Kill a program and its process group."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def kill_all() -> None:
    """Kill every program started here, before this process exits."""
    for process in tuple(_started):
        kill(process)


def output(*command: str | pathlib.Path, timeout: float | None = None) -> str:
    """Return what a program prints; empty if it is missing, fails or times out."""
    try:
        done = run(command, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def start_python(function: str, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a function of this package, such as `escalade.device.compilers.serve`, in a new Python process.

    The child imports this copy of the package and searches this process's `sys.path` after the standard library, but
    not the current folder: no file there can shadow a module. Its standard input is a socket, which can also carry
    file descriptors.
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


def run_python_under(
    program: Sequence[str], function: str, arguments: Sequence[str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a function of this package under another program, such as a profiler. `sys.argv` has the arguments."""
    return _run_to_end([*program, *_python(function, arguments)], timeout=timeout)


def _python(function: str, arguments: Sequence[str] = ()) -> list[str]:
    folder = pathlib.Path(__file__).absolute().parent.parent
    module, name = function.rsplit(".", 1)
    options = ["-I", "-W", "ignore", *(["-B"] if sys.dont_write_bytecode else [])]
    start = [sys.executable, *options, "-c", _START]
    return [*start, str(folder), module, name, *_search_path(), "--", *arguments]


def _search_path() -> list[str]:
    """Return `sys.path` without the current folder, which Python adds by itself, unless PYTHONPATH names it."""
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [
        entry for entry in sys.path if os.path.isabs(entry) and (entry in named or not _is_current(entry))
    ]


def _is_current(folder: str) -> bool:
    try:
        return os.path.samefile(folder, os.curdir)
    except OSError:
        return False


def _absolute(folders: str) -> str:
    """Drop the relative entries of a colon-separated list of folders."""
    return os.pathsep.join(entry for entry in folders.split(os.pathsep) if os.path.isabs(entry))
