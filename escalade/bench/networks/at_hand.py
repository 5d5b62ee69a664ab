"""Data and weights that are not ours to ship, where they are at hand."""

from __future__ import annotations

import os
import pathlib

_FOLDERS = ("data", "../shared/data")


def folders() -> tuple[pathlib.Path, ...]:
    """The folders where they are looked for: what `ESCALADE_DATA` names, or the usual ones."""
    given = os.environ.get("ESCALADE_DATA")
    return tuple(pathlib.Path(name) for name in ((given,) if given else _FOLDERS))


def find(name: str) -> pathlib.Path | None:
    """The file or folder of that name."""
    return next((folder / name for folder in folders() if (folder / name).exists()), None)
