"""Texts from elsewhere (names of files, labels, messages) as a terminal may be given them; sizes as they are read."""

from __future__ import annotations


def shown(text: object, keep: str = "") -> str:
    r"""Every character that moves the cursor, changes colours or order, or cannot be seen, as its escape: `\x1b`.

    `keep` is left as it is: line feeds and tabs, where a text has lines of its own.
    """
    return "".join(each if each.isprintable() or each in keep else _escape(each) for each in str(text))


def _escape(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def size(bytes: float) -> str:
    """A number of bytes as a person reads it: `1.5 GiB`."""
    units = ("bytes", "KiB", "MiB", "GiB")
    power = next((power for power in range(3) if bytes < 1024 ** (power + 1)), 3)
    return f"{bytes / 1024**power:.{min(power, 1)}f} {units[power]}"
