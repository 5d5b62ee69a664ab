"""Golden sets on disk, and their comparison: lines with a key, and fields that are compared one by one."""

from __future__ import annotations

import gzip
import json
import pathlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Line = dict[str, Any]
"""`key` identifies a line within its part, `task` is the unit of work that created it; other fields are compared."""
_LABELS = ("key", "task")
_MOST_CHARACTERS = 240


@dataclass
class Report:
    """The outcome of a comparison."""

    compared: int = 0
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def merge(self, other: Report) -> None:
        self.compared += other.compared
        self.differences += other.differences
        self.notes += other.notes


def write_lines(path: pathlib.Path, lines: Iterable[Line]) -> None:
    """Write lines as gzip'd JSON; equal lines make equal files."""
    text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode(), 6, mtime=0))


def read_lines(path: pathlib.Path, renames: Mapping[str, str] | None = None) -> list[Line]:
    """Read lines, replacing stored names by current ones."""
    text = renamed(gzip.decompress(path.read_bytes()).decode(), renames or {})
    return [json.loads(line) for line in text.splitlines()]


def renamed(text: str, renames: Mapping[str, str]) -> str:
    """Replace whole words; anything but a plain word is a regular expression."""
    for old, new in renames.items():
        text = re.sub(rf"\b{old}\b" if old.isidentifier() else old, new, text)
    return text


def compare(
    old: Sequence[Line], new: Sequence[Line], ignored: Collection[str] = (), additions_differ: bool = False
) -> Report:
    """Compare lines by key, field by field. Lines that only the current set has are a note, or with `additions_differ`
    a difference."""
    today = {line["key"]: line for line in new}
    report = Report(compared=len(old))
    for line in old:
        found = today.pop(line["key"], None)
        if found is None:
            report.differences.append(f"{line['key']}: gone")
            continue
        for name in sorted({*line, *found}.difference(_LABELS, ignored)):
            if line.get(name) != found.get(name):
                report.differences.append(
                    f"{line['key']}: {name}: {_changed(line.get(name), found.get(name))}"
                )
    added = [f"{key}: new" for key in today]
    if additions_differ:
        report.differences += added
    else:
        report.notes += added
    return report


def _changed(old: Any, new: Any) -> str:
    """Return the two values; for lists and objects of the same shape only the differing entries."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        pairs = ((f"[{n}]", a, b) for n, (a, b) in enumerate(zip(old, new, strict=True)) if a != b)
    elif isinstance(old, dict) and isinstance(new, dict):
        pairs = ((name, old.get(name), new.get(name)) for name in sorted({*old, *new}))
    else:
        return f"{_short(old)} -> {_short(new)}"
    return "; ".join(f"{where} {_short(a)} -> {_short(b)}" for where, a, b in pairs if a != b)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}…"
