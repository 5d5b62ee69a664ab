"""Tables of measured choices: the fastest rung and config per problem and GPU.

The user's table, filled by `escalade tune`, takes precedence over the one shipped for the GPU.
"""

from __future__ import annotations

import json
import math
import pathlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch

from escalade import files, parsing
from escalade.device.cache import default_directory
from escalade.errors import EscaladeError
from escalade.ops.base.card import Card, DeviceOrCard
from escalade.ops.base.problem import Problem

SHIPPED = pathlib.Path(__file__).parent / "tables"
NEAR = 2.0
"""Batch sizes within this factor share choices."""
_BATCH = re.compile(r"_b(\d+)")


class TableError(EscaladeError):
    """A table that cannot be read."""


@dataclass(frozen=True)
class Entry:
    rung: str
    config: Mapping[str, Any]
    median_us: float


@dataclass(frozen=True)
class TableMatch:
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

    def find(self, operation: str, problem: Problem) -> TableMatch | None:
        """Return the entry of this problem, or of the nearest batch size within a factor of two."""
        key = key_of(operation, problem)
        if key in self.entries:
            entry = self.entries[key]
            return TableMatch(entry, f"fastest when measured ({self.origin}, {entry.median_us:.3g} µs)")
        family = self._families.get(_BATCH.sub("_b*", key), {})
        near = [
            size for size in family if size and max(size, problem.batch) <= NEAR * min(size, problem.batch)
        ]
        if not near:
            return None
        size = min(near, key=lambda size: abs(math.log(size / problem.batch)))
        return TableMatch(family[size], f"fastest when measured at batch {size} ({self.origin})")


class Decided(Table):
    """The choices of an existing plan, for exactly its problems."""

    def __init__(self, origin: str, entries: Mapping[str, Entry]) -> None:
        self.origin = origin
        self.entries = dict(entries)

    def find(self, operation: str, problem: Problem) -> TableMatch | None:
        entry = self.entries.get(key_of(operation, problem))
        return None if entry is None else TableMatch(entry, f"chosen before ({self.origin})")


def add(path: pathlib.Path, key: str, entry: Entry) -> Table:
    """Add an entry to a table file, and return the merged table.

    Safe for concurrent processes. Other contents are preserved, including fields that later versions add. Keys are
    sorted, so that a table under version control changes only where an entry did.
    """
    merged: dict[str, Any] = {}

    def merge(contents: bytes | None) -> bytes:
        merged.update(_values(path, b"{}" if contents is None else contents))
        merged[key] = asdict(entry)
        lines = [f"{json.dumps(each)}: {json.dumps(merged[each])}" for each in sorted(merged)]
        return ("{\n" + ",\n".join(lines) + "\n}\n").encode()

    files.update(path, merge)
    return Table("your table", _entries(path, b"", merged))


def key_of(operation: str, problem: Problem) -> str:
    return f"{operation} {problem.name} {problem.dtype} {problem.layout}"


def _batch(key: str) -> int:
    found = _BATCH.search(key)
    return int(found[1]) if found else 0


def read(path: pathlib.Path, origin: str) -> Table:
    """Read a table; a missing file is an empty one."""
    contents = files.read(path)
    if contents is None:
        return Table(origin, {})
    return Table(origin, _entries(path, contents, _values(path, contents)))


def _values(path: pathlib.Path, contents: bytes) -> dict[str, Any]:
    """Return the entries of a file as JSON values, after checking each."""
    try:
        values = parsing.parse(contents.decode())
    except json.JSONDecodeError as error:
        where = f"{path}, line {error.lineno}"
        raise TableError(f"{where}: not a table of measured choices: invalid JSON: {error.msg}") from error
    except ValueError as error:
        raise TableError(f"{path} is not a table of measured choices: {error}") from error
    if not isinstance(values, dict):
        raise TableError(f"{path} is not a table of measured choices: expected a JSON object of entries")
    _entries(path, contents, values)
    return values


def _entries(path: pathlib.Path, contents: bytes, values: Mapping[str, Any]) -> dict[str, Entry]:
    entries = {}
    for key, value in values.items():
        try:
            entries[key] = parsing.parse_dataclass(Entry, value)
            if entries[key].median_us <= 0:
                raise ValueError(f"has median_us {entries[key].median_us}, which must be positive")
        except ValueError as error:
            raise TableError(
                f"{path}{_line(contents, key)} is not a table of measured choices: the entry {key!r} {error}"
            ) from error
    return entries


def _line(contents: bytes, key: str) -> str:
    """Return the line of an entry for an error message, if its key is spelled as we spell it."""
    before, found, _ = contents.partition(json.dumps(key).encode())
    number = before.count(b"\n") + 1
    return f", line {number}," if found else ""


def user_path(gpu: str) -> pathlib.Path:
    return default_directory() / "tune" / f"{_file_name(gpu)}.json"


def shipped_path(gpu: str) -> pathlib.Path:
    return SHIPPED / f"{_file_name(gpu)}.json"


def _file_name(gpu: str) -> str:
    """`NVIDIA H200` is stored in `nvidia-h200.json`."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") or "unknown"


def tables_for(target: DeviceOrCard) -> tuple[Table, ...]:
    """Return the tables of a GPU: the user's, then ours."""
    gpu = target.name if isinstance(target, Card) else torch.cuda.get_device_name(target)
    return (_current(user_path(gpu), "your table"), _current(shipped_path(gpu), "Escalade's table"))


def _current(path: pathlib.Path, origin: str) -> Table:
    """Reread the file if it changed, as `escalade tune` in another process may change it."""
    try:
        status = path.stat()
    except OSError:
        return _EMPTY
    return _read_at(path, origin, (status.st_mtime_ns, status.st_ino, status.st_size))


@lru_cache(maxsize=8)
def _read_at(path: pathlib.Path, origin: str, stamp: tuple[int, ...]) -> Table:
    return read(path, origin)


_EMPTY = Table("", {})
