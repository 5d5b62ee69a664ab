"""How often a shard was begun, and over what its workers ended: so that an image which ends a process is found.

A worker notes what it is about to do in a file beside those that are being written, and takes the note away when the
shard is done. Whoever gets the shard again finds the note of one that was killed. What was under way then is done in
smaller pieces: a batch at a time, then an image at a time; and an image over which a process has ended by itself
`MOST_ENDS` times is told of as unreadable.
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

MOST_ENDS = 2
"""Processes that may end over one image by itself, or over making the network, before it is given up."""

Range = tuple[int, int]
"""Images of a shard, from the first to before the last."""
_MAKING: Range = (0, 0)
"""What is under way while a worker makes its engine."""


@dataclass
class Attempts:
    """What is known of a shard of so many images, which go through the network `batch` at a time."""

    folder: Folder
    name: str
    images: int
    batch: int
    ended: list[Range]
    """What was under way whenever a process has ended."""

    @classmethod
    def of(cls, folder: Folder, name: str, images: int, batch: int) -> Attempts:
        """What the note of a shard says, if there is one."""
        return cls(folder, name, images, batch, _noted(folder.unfinished(name)))

    def make(self) -> None:
        """Notes that a network is made, or refuses to make it once more."""
        if self.ended.count(_MAKING) > MOST_ENDS:
            raise LaunchError(
                f"the process of a worker has ended {self.ended.count(_MAKING)} times while it was making the network"
            )
        self._note(_MAKING)

    def pieces(self) -> Iterator[tuple[Range, bool]]:
        """What the shard is done in, each with whether it is given up; it is noted before it is begun."""
        for piece in self._split((0, self.images)):
            is_given_up = self.ended.count(piece) >= MOST_ENDS and piece[1] - piece[0] == 1
            if not is_given_up:
                self._note(piece)
            yield piece, is_given_up

    def __enter__(self) -> Attempts:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        """Takes the note away: whatever has happened, the process has not ended."""
        with nullcontext() if kind is None else suppress(UnsupportedError):
            self.folder.forget(self.name)

    def _split(self, piece: Range) -> Iterator[Range]:
        """A range over which no process has ended, or what is left of it in smaller ones."""
        first, last = piece
        if last - first <= 1 or not any(first <= start < end <= last for start, end in self.ended):
            yield piece
            return
        step = self.batch if last - first > self.batch else 1
        for start in range(first, last, step):
            yield from self._split((start, min(start + step, last)))

    def _note(self, piece: Range) -> None:
        self.folder.note(self.name, json.dumps([*self.ended, piece]).encode())


def _noted(note: bytes | None) -> list[Range]:
    """The ranges of a note; what was written to it while the process ended may be no note."""
    try:
        found: Any = [] if note is None else parsing.parse(note)
        return [(int(first), int(last)) for first, last in found]
    except (ValueError, TypeError):
        return []
