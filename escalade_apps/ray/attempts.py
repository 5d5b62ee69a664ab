"""Track crashes per shard, to isolate an image that crashes its worker.

A worker writes a note of the range of images it is about to process, and deletes it when the shard is done. A worker
that gets the shard after a crash finds the note and splits the crashed range: into batches, then into single images. A
single image that crashed `MAX_CRASHES` workers is reported as unreadable.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any

from escalade import parsing
from escalade.errors import LaunchError, UnsupportedError
from escalade_apps.ray.storage import Folder

MAX_CRASHES = 2
"""Worker crashes on a single image, or while loading the network, before giving up."""

Range = tuple[int, int]
"""Half-open range of images in a shard."""
_LOADING: Range = (0, 0)
"""Noted while a worker loads its engine."""


@dataclass
class Attempts:
    """Crash history of a shard of `images` images."""

    folder: Folder
    name: str
    images: int
    batch: int
    crashed: list[Range]
    """Range in flight at each crash."""

    @classmethod
    def of(cls, folder: Folder, name: str, images: int, batch: int) -> Attempts:
        """Read the note of a shard, if there is one."""
        return cls(folder, name, images, batch, _parse_note(folder.unfinished(name)))

    def load(self) -> None:
        """Note that a network is being loaded. Raises LaunchError if that crashed too often."""
        if self.crashed.count(_LOADING) > MAX_CRASHES:
            raise LaunchError(
                f"a worker crashed {self.crashed.count(_LOADING)} times while loading the network"
            )
        self._note(_LOADING)

    def ranges(self) -> Iterator[tuple[Range, bool]]:
        """Yield each range, and whether to skip it. A range that is not skipped is noted first."""
        for part in self._split((0, self.images)):
            skip = self.crashed.count(part) >= MAX_CRASHES and part[1] - part[0] == 1
            if not skip:
                self._note(part)
            yield part, skip

    def __enter__(self) -> Attempts:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Delete the note: an exception is not a crash."""
        with nullcontext() if kind is None else suppress(UnsupportedError):
            self.folder.forget(self.name)

    def _split(self, part: Range) -> Iterator[Range]:
        """Yield the range if no worker crashed inside it, else split it further."""
        first, last = part
        if last - first <= 1 or not any(first <= start < end <= last for start, end in self.crashed):
            yield part
            return
        step = self.batch if last - first > self.batch else 1
        for start in range(first, last, step):
            yield from self._split((start, min(start + step, last)))

    def _note(self, part: Range) -> None:
        self.folder.note(self.name, json.dumps([*self.crashed, part]).encode())


def _parse_note(note: bytes | None) -> list[Range]:
    """Parse the ranges of a note. A note that was cut off by a crash counts as empty."""
    try:
        found: Any = [] if note is None else parsing.parse(note)
        return [(int(first), int(last)) for first, last in found]
    except (ValueError, TypeError):
        return []
