"""Progress bars and status lines on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.status import Status

Say = Callable[[str], None]


def progress_bar(
    console: Console, *extra: ProgressColumn, transient: bool = True, disable: bool = False
) -> Progress:
    """Return a progress bar with a count and `extra` columns, by default the elapsed time."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(
        *columns, *(extra or (TimeElapsedColumn(),)), console=console, transient=transient, disable=disable
    )


def waiting(text: str) -> Status:
    """Return a spinner on stderr, which is shown only on a terminal."""
    return Console(stderr=True).status(escape(text))


@contextmanager
def status(console: Console) -> Iterator[Say]:
    """Yield a function that reports status: one changing line on a terminal, one line per call in a log."""
    if not console.is_terminal:
        yield lambda text: console.print(escape(text))
        return
    with console.status("") as status:
        yield lambda text: status.update(escape(text))
