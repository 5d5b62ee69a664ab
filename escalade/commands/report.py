"""The command `report`: all records as one HTML file."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from escalade import files
from escalade.commands.options import written
from escalade.report.html import changes, page
from escalade.report.tables import require_records


def command(
    results: Annotated[pathlib.Path, typer.Option(help="Where the records are.")] = pathlib.Path("results"),
    output: Annotated[pathlib.Path, written("--output", help="The file to write.")] = pathlib.Path(
        "report.html"
    ),
    against: Annotated[
        pathlib.Path | None,
        typer.Option(help="Older records, a folder or a file: what got slower or faster since."),
    ] = None,
) -> None:
    """All records as one HTML file: the verdict, ladders, networks, and where each figure comes from."""
    records = require_records(results)
    since = changes.between(changes.read_old(against), records) if against else None
    files.replace(output, page.report(records, since).encode())
    if since is not None:
        typer.echo(since.sentence)
        for change in since.slower:
            typer.echo(f"slower, {change.speedup:.2f}×: {' '.join(filter(None, change.new.key))}")
    typer.echo(f"wrote {output.resolve()}")
