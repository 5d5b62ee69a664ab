"""`escalade report tables`: the generated parts of README.md and docs."""

from __future__ import annotations

import pathlib
from typing import Annotated

import typer


def command(
    check: Annotated[bool, typer.Option(help="Change nothing; fail if a table is out of date.")] = False,
    results: Annotated[pathlib.Path, typer.Option(help="Folder of the records.")] = pathlib.Path("results"),
    root: Annotated[pathlib.Path, typer.Option(help="Folder of README.md and docs.")] = pathlib.Path("."),
) -> None:
    """Write the tables and plots of README.md and docs from the records in results/."""
    from escalade_bench.report import tables as generated

    generated.require_records(results)
    if check:
        stale = generated.stale(results, root)
        for path in stale:
            typer.echo(f"{path} is out of date; run: escalade report tables")
        raise typer.Exit(1 if stale else 0)
    for path in generated.write(results, root):
        typer.echo(f"wrote {path}")
