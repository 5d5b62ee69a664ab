"""Text for terminals: untrusted strings (file names, labels, messages) escaped, and sizes formatted."""

from __future__ import annotations


def printable(text: object, keep: str = "") -> str:
    r"""Escape control and invisible characters (`\x1b`), except those in `keep`, such as newlines and tabs."""
    return "".join(each if each.isprintable() or each in keep else _escape(each) for each in str(text))


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


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
