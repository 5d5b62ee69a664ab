"""The command `calls`: what a call of an operator costs the CPU, beside PyTorch's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from escalade.bench.calls.catalogue import CALLS, STORAGE, chosen
from escalade.bench.calls.measurement import measure
from escalade.commands.devices import kernel_device
from escalade.commands.options import Dtypes, InputSeed, RecordsFile, RecordsFolder, listed
from escalade.commands.progress import status
from escalade.errors import UnsupportedError
from escalade.measure import records as store
from escalade.measure.records import Record
from escalade.report.pages.records import calls_table


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"Calls: {', '.join(CALLS)}. Without any: all.", show_default=False),
    ] = None,
    dtype: Dtypes = None,
    seconds: Annotated[float, typer.Option(min=0.0, help="How long to measure each system.")] = 0.05,
    seed: InputSeed = 0,
    json: RecordsFile = None,
    results: RecordsFolder = None,
) -> None:
    """What a call of an operator costs the CPU beside PyTorch's, alone and with its gradients. Needs a GPU."""
    console = Console()
    wanted, dtypes = chosen(tuple(names or ())), listed(dtype)
    for one in dtypes:
        if one not in STORAGE:
            raise UnsupportedError(f"there is no dtype {one!r} here; there is {', '.join(STORAGE)}")
    device = kernel_device("cuda")
    origin = store.provenance(device)
    found: list[Record] = []
    with status(console) as say:
        for call in wanted.values():
            for one in (each for each in call.layouts if not dtypes or each in dtypes):
                say(f"{call.name} {one}")
                for records in measure(call, one, device, seconds, seed):
                    stamped = [record.stamped(origin) for record in records]
                    found += stamped
                    if json:
                        store.write(json, stamped)
                    if results:
                        store.file_away(results, stamped)
    _show(found, console)
    if any(record.failure and not record.is_peer for record in found):
        raise typer.Exit(1)


def _show(records: Sequence[Record], console: Console) -> None:
    console.print(calls_table(records, "Host time per call"))
    for record in records:
        if record.failure:
            kind = "[yellow]note:[/]" if record.is_peer else "[red]failed:[/]"
            console.print(
                f"{kind} {escape(record.system)} {escape(record.problem)}: {escape(record.failure)}"
            )
