"""Locate data and weights that are not shipped."""

from __future__ import annotations

import os
import pathlib

_FOLDERS = ("data", "../shared/data")


def folders() -> tuple[pathlib.Path, ...]:
    """Return the folders that are searched: `ESCALADE_DATA`, or the usual ones."""
    given = os.environ.get("ESCALADE_DATA")
    return tuple(pathlib.Path(name) for name in ((given,) if given else _FOLDERS))


def find(name: str) -> pathlib.Path | None:
    """Return the file or folder of that name, or None."""
    return next((folder / name for folder in folders() if (folder / name).exists()), None)
