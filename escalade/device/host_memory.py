"""Memory that is left on the host, where an operating system ends processes that take more of it than there is."""

from __future__ import annotations

import pathlib
import re

from escalade.errors import OutOfMemory

_MEMORY = pathlib.Path("/proc/meminfo")
_GROUP = pathlib.Path("/sys/fs/cgroup")
"""Where a container's limit stands, in version 2."""


def require(wanted: int, what: str) -> None:
    """Refuses what takes more bytes than are left."""
    left = available()
    if left is not None and wanted > left:
        raise OutOfMemory(
            f"{what}: that takes {wanted / 2**30:,.1f} GiB of memory at least, and {left / 2**30:,.1f} GiB are left "
            "here. Take a smaller batch or smaller images"
        )


def available() -> int | None:
    """The bytes that are left; None where nobody says."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(_MEMORY), re.MULTILINE)
    limit, used = _text(_GROUP / "memory.max").strip(), _text(_GROUP / "memory.current").strip()
    known = [int(found[1]) * 1024] if found else []
    if limit.isdecimal() and used.isdecimal():
        known.append(max(0, int(limit) - int(used)))
    return min(known, default=None)


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
