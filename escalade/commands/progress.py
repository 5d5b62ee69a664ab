"""What a terminal shows while a command runs."""

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
    console: Console, *further: ProgressColumn, transient: bool = True, disable: bool = False
) -> Progress:
    """A bar with what is done of how many, and the time that has passed or what the further columns show."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(
        *columns, *(further or (TimeElapsedColumn(),)), console=console, transient=transient, disable=disable
    )


def waiting(text: str) -> Status:
    """A line that moves while something takes its time; on a terminal, and not among what a command prints."""
    return Console(stderr=True).status(escape(text))


@contextmanager
def status(console: Console) -> Iterator[Say]:
    """One line that changes on a terminal, one line each in a log."""
    if not console.is_terminal:
        yield lambda text: console.print(escape(text))
        return
    with console.status("") as status:
        yield lambda text: status.update(escape(text))
