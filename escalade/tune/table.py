"""Tables of measured choices: for a problem on a GPU, the rung and config that were fastest.

The user's own table (`escalade tune` fills it) comes before the one that Escalade ships for the GPU.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch

from escalade.device.cache import default_directory
from escalade.errors import EscaladeError
from escalade.ops.ladder import Problem

SHIPPED = pathlib.Path(__file__).parent / "tables"
NEAR = 2.0
"""Batch sizes up to this factor away share their choices."""
_BATCH = re.compile(r"_b(\d+)")


class TableError(EscaladeError):
    """A table that cannot be read."""


@dataclass(frozen=True)
class Entry:
    rung: str
    config: Mapping[str, Any]
    median_us: float


@dataclass(frozen=True)
class Found:
    entry: Entry
    why: str


class Table:
    """Entries by operation, problem, dtype and layout."""

    def __init__(self, origin: str, entries: dict[str, Entry]) -> None:
        self.origin = origin
        self.entries = entries
        self._families: dict[str, dict[int, Entry]] = {}
        for key, entry in entries.items():
            self._families.setdefault(_BATCH.sub("_b*", key), {})[_batch(key)] = entry

    def find(self, operation: str, problem: Problem) -> Found | None:
        """Measured for this very problem, or for the same one at the nearest batch size within a factor of two."""
        key = key_of(operation, problem)
        if key in self.entries:
            entry = self.entries[key]
            return Found(entry, f"fastest when measured ({self.origin}, {entry.median_us:.3g} µs)")
        family = self._families.get(_BATCH.sub("_b*", key), {})
        near = [
            size for size in family if size and max(size, problem.batch) <= NEAR * min(size, problem.batch)
        ]
        if not near:
            return None
        size = min(near, key=lambda size: abs(math.log(size / problem.batch)))
        return Found(family[size], f"fastest when measured at batch {size} ({self.origin})")

    def with_entry(self, operation: str, problem: Problem, entry: Entry) -> Table:
        return Table(self.origin, {**self.entries, key_of(operation, problem): entry})

    def save(self, path: pathlib.Path) -> None:
        """Whole or not at all; sorted, so that a table under version control changes where it changed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            f"{json.dumps(key)}: {json.dumps(asdict(self.entries[key]))}" for key in sorted(self.entries)
        ]
        text = "{\n" + ",\n".join(lines) + "\n}\n"
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)


def key_of(operation: str, problem: Problem) -> str:
    return f"{operation} {problem.name} {problem.dtype} {problem.layout}"


def _batch(key: str) -> int:
    found = _BATCH.search(key)
    return int(found[1]) if found else 0


def read(path: pathlib.Path, origin: str) -> Table:
    """An empty table if there is no such file."""
    if not path.exists():
        return Table(origin, {})
    try:
        entries = {key: Entry(**entry) for key, entry in json.loads(path.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise TableError(f"{path} is no table of measured choices: {error}") from error
    return Table(origin, entries)


def user_path(gpu: str) -> pathlib.Path:
    return default_directory() / "tune" / f"{_file_name(gpu)}.json"


def shipped_path(gpu: str) -> pathlib.Path:
    return SHIPPED / f"{_file_name(gpu)}.json"


def _file_name(gpu: str) -> str:
    """`NVIDIA H200` is in `nvidia-h200.json`."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "unknown"


def tables_for(device: torch.device) -> tuple[Table, ...]:
    """The user's, then ours."""
    gpu = torch.cuda.get_device_name(device)
    return (_current(user_path(gpu), "your table"), _current(shipped_path(gpu), "Escalade's table"))


def _current(path: pathlib.Path, origin: str) -> Table:
    """Read again when the file changes, as `escalade tune` in another process makes it."""
    try:
        stamp = path.stat().st_mtime_ns
    except OSError:
        return _EMPTY
    return _read_at(path, origin, stamp)


@lru_cache(maxsize=8)
def _read_at(path: pathlib.Path, origin: str, stamp: int) -> Table:
    return read(path, origin)


_EMPTY = Table("", {})
