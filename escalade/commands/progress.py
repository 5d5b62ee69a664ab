"""Progress bars and status lines on the terminal, and additional output files."""

from __future__ import annotations

import pathlib
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
    TimeRemainingColumn,
)
from rich.status import Status

from escalade import files
from escalade.terminal_text import format_duration

Say = Callable[[str], None]
_LONG_SECONDS = 10.0
"""Work that takes less is not announced."""


def progress_bar(
    console: Console, *extra: ProgressColumn, transient: bool = True, disable: bool = False
) -> Progress:
    """Return a progress bar with a count and `extra` columns, by default the elapsed time."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(
        *columns, *(extra or (TimeElapsedColumn(),)), console=console, transient=transient, disable=disable
    )


@contextmanager
def counted_progress(console: Console, what: str, total: int) -> Iterator[tuple[Say, Callable[[], None]]]:
    """Yield functions that report status and advance: a bar on a terminal, one line per status in a log."""
    if not console.is_terminal:
        with status(console) as say:
            yield say, lambda: None
        return
    with progress_bar(console, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        task = progress.add_task(escape(what), total=total)
        yield (
            lambda text: progress.update(task, description=escape(text)),
            lambda: progress.advance(task),
        )


def announce(console: Console, work: str, seconds: float, less: str) -> None:
    """Announce work and its estimated duration, unless it is short; `less` suggests how to reduce it."""
    if seconds >= _LONG_SECONDS:
        console.print(
            escape(f"{work}: about {format_duration(seconds)}. {less}"), highlight=False, soft_wrap=True
        )


def write_text(path: pathlib.Path, text: str, console: Console) -> None:
    """Write a file atomically, and print its path."""
    files.replace(path, text.encode())
    console.print(f"wrote {escape(str(path))}")


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
