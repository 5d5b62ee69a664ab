"""`escalade cache`: show or clear the kernel cache."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from escalade import parsing
from escalade.device.cache import Entry, default_cache
from escalade.errors import UnsupportedError
from escalade.narrow_tables import Table
from escalade.terminal_text import counted, format_bytes, printable

KINDS = {
    ".bin": "kernels for a GPU",
    ".so": "kernels for the twin",
    ".gch": "precompiled headers for the twin",
    ".run": "sanitizers of the twin",
}
"""Kind of an entry by its suffix."""
_AGES = ((86400, "days"), (3600, "hours"), (60, "minutes"), (1, "seconds"))


def command(
    clear: Annotated[bool, typer.Option("--clear", help="Remove all entries.")] = False,
    limit: Annotated[
        str | None,
        typer.Option(help="Remove the least recently used entries until the rest fits, such as 200MiB."),
    ] = None,
) -> None:
    """Show the kernels cached on disk (count, size, last use), or remove them."""
    console = Console()
    if clear and limit is not None:
        raise UnsupportedError(
            "--clear removes all entries and --limit some of them; pass only one of the two"
        )
    cache = default_cache()
    if clear or limit is not None:
        removed = cache.trim(_bytes(limit) if limit is not None else 0)
        console.print(f"removed {counted(len(removed), 'entry')}, {_total(removed)}", highlight=False)
        if clear and (left := len(cache.entries())):
            console.print(
                f"{left} stay for now: they were used in the last {cache.grace_seconds:.0f} seconds, and another "
                "process may be about to open them",
                highlight=False,
            )
        return
    entries = cache.entries()
    console.print(Text(printable(cache.directory)))
    console.print(_table(entries))
    console.print(
        f"{counted(len(entries), 'entry')}, {_total(entries)} of at most {format_bytes(cache.limit_bytes)} (set "
        "ESCALADE_CACHE_LIMIT to change that); the least recently used are evicted first",
        highlight=False,
    )
    if problem := cache.problem():
        console.print(
            Text(f"New entries are not kept after the process that makes them: {printable(problem)}")
        )


def _bytes(text: str) -> int:
    try:
        return parsing.parse_size(text)
    except ValueError as error:
        raise UnsupportedError(f"--limit: {error}") from error


def _table(entries: Sequence[Entry]) -> Table:
    table = Table("kind", "entries", "size", "oldest use", "latest use")
    for suffix, kind in KINDS.items():
        of_kind = [entry for entry in entries if entry.path.suffix == suffix]
        if of_kind:
            uses = [entry.last_use for entry in of_kind]
            table.add_row(kind, str(len(of_kind)), _total(of_kind), _ago(min(uses)), _ago(max(uses)))
    return table


def _total(entries: Sequence[Entry]) -> str:
    return format_bytes(sum(entry.bytes for entry in entries))


def _ago(then: float) -> str:
    seconds = max(time.time() - then, 0)
    unit, name = next((each for each in _AGES if seconds >= 2 * each[0]), _AGES[-1])
    return f"{seconds / unit:.0f} {name} ago"
