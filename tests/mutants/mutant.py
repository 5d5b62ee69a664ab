"""One planted bug, as data."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """A bug to plant: one exact replacement in one file, and the tests that must fail with it."""

    name: str
    """`area/description`; the area is the name of the module that lists it."""
    file: str
    """Path from the repository root."""
    old: str
    """Text that occurs exactly once in `file`. Short, so that unrelated edits do not make the mutant stale."""
    new: str
    tests: tuple[str, ...]
    """Arguments of pytest: paths or node ids from the repository root."""
    keyword: str = ""
    """The cases of these tests to run, as for pytest's `-k`; all of them by default."""

    def planted(self, root: pathlib.Path) -> str | None:
        """Return the file's text with the bug, or None if the mutant is stale."""
        path = root / self.file
        text = path.read_text() if path.is_file() else ""
        return text.replace(self.old, self.new) if text.count(self.old) == 1 else None
