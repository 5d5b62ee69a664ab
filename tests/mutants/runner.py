"""Plant bugs one at a time in a scratch copy of a repository and run the tests that should notice."""

from __future__ import annotations

import contextlib
import enum
import importlib.util
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

from tests.mutants.mutant import Mutant

# The day of the rotating cases is fixed, so that an outcome does not change from day to day.
_OPTIONS = "-x -q -n 0 --seed 1 --sample 2026-11-17 -p no:cacheprovider"
_NO_TESTS_RAN = (4, 5)  # pytest: usage error (a missing test), nothing collected
_SERVER = """
import importlib, json, os, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
import pytest

sys.path = [path for path in sys.path if path]
while line := sys.stdin.readline():
    if child := os.fork():
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    else:
        break
else:
    sys.exit()
os.setpgid(0, 0)
job = json.loads(line)
os.dup2(os.open(os.devnull, os.O_RDWR), 0)
os.dup2(0 if job["quiet"] else 2, 1)
if job["quiet"]:
    os.dup2(0, 2)
os.environ.clear()
os.environ.update(job["environment"])
os.chdir(job["folder"])
sys.path.insert(0, job["folder"])
sys.exit(pytest.main(job["arguments"]))
"""
"""Forks a process for each run, with PyTorch imported, which takes longer than most tests."""
IMPORTED = ("torch", "torch.export", "torch._dynamo", "hypothesis")


class Outcome(enum.Enum):
    KILLED = "killed"
    SURVIVED = "SURVIVED"
    STALE = "stale"
    """The text to replace does not occur exactly once."""
    BROKEN = "broken"
    """The tests do not run, or fail without the mutant too."""


class Scratch:
    """A copy of a repository and of its kernel cache, in a temporary folder."""

    def __init__(
        self,
        folder: pathlib.Path,
        root: pathlib.Path,
        cache: pathlib.Path,
        server: subprocess.Popen[str],
        timeout: float,
    ) -> None:
        self.tree = folder / "tree"
        self._cache, self._cache_of_one = folder / "cache", folder / "cache-of-one"
        self._timeout = timeout
        self._server = server
        listed = subprocess.run(
            ["git", "-C", str(root), "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            check=True, capture_output=True, text=True,
        ).stdout  # fmt: skip
        for name in filter(None, listed.split("\0")):
            if (root / name).is_file():
                (self.tree / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.tree / name)
        if cache.is_dir():
            # Temporary entries of concurrent processes come and go.
            unfinished = shutil.ignore_patterns("making-*")
            shutil.copytree(cache, self._cache, copy_function=_link_or_copy, ignore=unfinished)
        else:
            self._cache.mkdir(mode=0o700)

    def passes_unchanged(self, mutants: Sequence[Mutant]) -> bool:
        """Run the mutants' tests without any of them, which fills the cache for all later runs."""
        tests: dict[str, set[str]] = {}
        for mutant in mutants:
            tests.setdefault(mutant.keyword, set()).update(mutant.tests)
        return all(
            self._pytest(sorted(named), keyword, self._cache, quiet=False) == 0
            for keyword, named in tests.items()
        )

    def outcome(self, mutant: Mutant) -> Outcome:
        text = mutant.planted(self.tree)
        if text is None:
            return Outcome.STALE
        path = self.tree / mutant.file
        before = path.read_text()
        # A mutant of a cache key stores entries under wrong keys: none of them may be visible to the next mutant.
        shutil.copytree(self._cache, self._cache_of_one, copy_function=_link_or_copy)
        try:
            _write(path, text)
            code = self._pytest(mutant.tests, mutant.keyword, self._cache_of_one, quiet=True)
        finally:
            _write(path, before)
            shutil.rmtree(self._cache_of_one)
        if code in _NO_TESTS_RAN:
            return Outcome.BROKEN
        return Outcome.SURVIVED if code == 0 else Outcome.KILLED

    def _pytest(self, tests: Sequence[str], keyword: str, cache: pathlib.Path, quiet: bool) -> int | None:
        """Run pytest and return its exit status; None at the time limit, which a hanging mutant reaches."""
        chosen = ["-k", keyword, *tests] if keyword else tests
        job = {
            "folder": str(self.tree),
            "environment": {**os.environ, "PYTHONPATH": str(self.tree), "ESCALADE_CACHE_DIR": str(cache)},
            "arguments": [*_OPTIONS.split(), *chosen],
            "quiet": quiet,
        }
        server = self._server
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        group = int(server.stdout.readline())
        ended, _, _ = select.select([server.stdout], [], [], self._timeout)
        with contextlib.suppress(ProcessLookupError):  # including all child processes of the tests
            os.killpg(group, signal.SIGKILL)
        status = int(server.stdout.readline())
        return status if ended else None


@contextlib.contextmanager
def scratch(
    root: pathlib.Path, cache: pathlib.Path, imported: Sequence[str] = IMPORTED, timeout: float = 600.0
) -> Iterator[Scratch]:
    """Copy tracked and new files of `root`, which is unchanged, and remove the copy at the end.

    Runs start with the modules in `imported` imported.
    """
    with tempfile.TemporaryDirectory(prefix="escalade-mutants-") as folder:
        # In a folder without code, so that only PyTorch and pytest are imported already.
        command = [sys.executable, "-c", _SERVER, *imported]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=folder, stdin=pipe, stdout=pipe, text=True) as server:
            yield Scratch(pathlib.Path(folder), root, cache, server, timeout)
            assert server.stdin is not None
            server.stdin.close()


def _write(path: pathlib.Path, text: str) -> None:
    path.write_text(text)
    # Python considers a module's bytecode current by time in seconds and size: the last mutant's may have the same.
    if path.suffix == ".py":
        pathlib.Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def _link_or_copy(source: str, target: str) -> None:
    """Cache entries are replaced, never modified, so a hard link is a copy."""
    try:
        os.link(source, target)
    except OSError:  # another file system
        with contextlib.suppress(FileNotFoundError):  # another process evicted it
            shutil.copy2(source, target)
