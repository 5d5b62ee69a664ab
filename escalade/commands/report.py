"""`escalade report`: all records as one HTML file."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer

from escalade import files
from escalade.commands.options import written


def command(
    results: Annotated[pathlib.Path, typer.Option(help="Folder of the records.")] = pathlib.Path("results"),
    output: Annotated[pathlib.Path, written("--output", help="File to write.")] = pathlib.Path("report.html"),
    against: Annotated[
        pathlib.Path | None,
        typer.Option(help="Older records, a folder or a file: show what got slower or faster since."),
    ] = None,
) -> None:
    """Write all records as one HTML file: README's table and plots, then every network, layer and ladder."""
    from escalade_bench.report import changes, html
    from escalade_bench.report.tables import require_records

    records = require_records(results)
    since = changes.between(changes.read_old(against), records) if against else None
    files.replace(output, html.report(records, since).encode())
    if since is not None:
        typer.echo(since.sentence)
        for change in since.slower:
            typer.echo(f"slower, {changes.speedup(change):.2f}×: {' '.join(filter(None, change[1].key))}")
    typer.echo(f"wrote {output.resolve()}")
