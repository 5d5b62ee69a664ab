"""Available host memory. Linux kills processes that exceed it, so large requests are checked first."""

from __future__ import annotations

import pathlib
import re

from escalade.errors import OutOfMemory

_MEMORY = pathlib.Path("/proc/meminfo")
_GROUP = pathlib.Path("/sys/fs/cgroup")
"""Memory limit of a container (cgroup version 2)."""


def require(wanted: int, what: str) -> None:
    """Raise OutOfMemory if `wanted` bytes are not available."""
    left = available()
    if left is not None and wanted > left:
        raise OutOfMemory(
            f"{what}: needs at least {wanted / 2**30:,.1f} GiB of memory; {left / 2**30:,.1f} GiB are available. "
            "Use a smaller batch or smaller images"
        )


def available() -> int | None:
    """Return the available bytes; None if unknown."""
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
