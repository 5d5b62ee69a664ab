"""Text for terminals: untrusted strings (file names, labels, messages) escaped, and sizes formatted."""

from __future__ import annotations

import contextlib
import io
import random
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import ConsoleRenderable

_LOG_WIDTH = 200
"""Width in characters of text that is not for a terminal."""


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restore Python's random generator: importing Rich draws a number, and the caller may have set a seed."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


def as_text(renderable: ConsoleRenderable) -> str:
    """Return what Rich would print, as wide as the terminal."""
    with preserved_random_state():
        from rich.console import Console

        text = io.StringIO()
        width = shutil.get_terminal_size((_LOG_WIDTH, 0)).columns
        Console(file=text, width=width, color_system=None).print(renderable)
    return text.getvalue()


def printable(text: object, keep: str = "") -> str:
    r"""Escape control and invisible characters (`\x1b`), except those in `keep`, such as newlines and tabs."""
    return "".join(each if each.isprintable() or each in keep else _escape(each) for each in str(text))


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def first_line(error: Exception) -> str:
    """Return the first line of an error's message; its type if it has none."""
    return printable((str(error).strip().splitlines() or [type(error).__name__])[0])


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 step`, `1,000 steps`, `2 launches`, `3 entries`."""
    stem, ending = (
        (noun[:-1], "ies") if noun.endswith("y") else (noun, "es" if noun.endswith(("ch", "ss")) else "s")
    )
    return f"{number:,} {noun if number == 1 else stem + ending}"


def format_duration(seconds: float) -> str:
    """Format a duration: `45 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def format_bytes(bytes: float) -> str:
    """Format a number of bytes: `1.5 GiB`."""
    units = ("bytes", "KiB", "MiB", "GiB")
    power = next((power for power in range(3) if bytes < 1024 ** (power + 1)), 3)
    return f"{bytes / 1024**power:.{min(power, 1)}f} {units[power]}"
