"""The command `measure`: every figure of README and docs that is missing or overtaken, within a budget."""

from __future__ import annotations

import pathlib
import re
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape

from escalade.bench.campaign import coverage, evaluation, registry
from escalade.bench.campaign.runner import Clock, ceiling_records, duration, ordered, run
from escalade.bench.campaign.staleness import State, states
from escalade.bench.campaign.units import Session
from escalade.bench.peers.catalogue import PEERS
from escalade.commands.progress import Say
from escalade.errors import UnsupportedError
from escalade.measure import records as store
from escalade.measure.records import Record
from escalade.report.tables import PREFERRED_GPU

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            help="Only these units: names, how they begin, or patterns, such as ladder/conv2d or network/*/fp16.",
            show_default=False,
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(
            help="How long it may take, such as 540, 9m or 1h: no unit is begun that would not end in time."
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure also what is up to date.")] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Measure nothing; say what is missing or overtaken, fail if anything is."
        ),
    ] = False,
    list_units: Annotated[
        bool,
        typer.Option("--list", help="Measure nothing; show every unit with the command that repeats it."),
    ] = False,
    results: Annotated[pathlib.Path, typer.Option(help="Where the records are, and go.")] = pathlib.Path(
        "results"
    ),
    gpu: Annotated[
        str | None,
        typer.Option(
            help="The folder of the card that --check and --list are about; this card's, else the docs'."
        ),
    ] = None,
) -> None:
    """Measure what README and docs show and what is missing or overtaken, the most valuable first, within a budget.

    Records are filed as they are made: a run that is stopped, by its budget or by Ctrl-C, goes on where it was.
    """
    console = Console(soft_wrap=True)
    chosen = registry.named(tuple(names or ()))
    limit = _budget(budget)
    here = torch.cuda.is_available()
    known = store.load_folder(results).get(gpu or _folder(here), [])
    found = states(chosen, known, store.versions() if here and gpu is None else None)
    if list_units:
        _list(found, console)
        return
    if check:
        _say_stale(found, console)
        raise typer.Exit(1 if any(state.stale for state in found) else 0)
    if not here:
        raise UnsupportedError("measuring takes a GPU, and there is none; --check and --list need none")
    if again:
        found = [State(state.unit, state.why or "asked for again", state.seconds) for state in found]
    _measure(ordered(found), limit, results, console)


def _budget(text: str | None) -> float | None:
    """`540`, `540s`, `9m`, `1.5h` in seconds."""
    if text is None:
        return None
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip())
    if parts is None or parts[2] not in _SECONDS:
        raise typer.BadParameter(f"{text!r} is no time; write 540, 540s, 9m or 1h", param_hint="--budget")
    return float(parts[1]) * _SECONDS[parts[2]]


def _folder(here: bool) -> str:
    return store.gpu_folder(torch.cuda.get_device_name()) if here else PREFERRED_GPU


def _measure(stale: list[State], limit: float | None, results: pathlib.Path, console: Console) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    origin = store.provenance(device)
    session = Session(device)
    failed: list[Record] = []
    _summary(stale, console)
    for peer in PEERS:
        if peer.refusal:
            console.print(f"[yellow]without {escape(peer.title)}:[/] {escape(peer.refusal)}")

    def keep(records: Sequence[Record]) -> None:
        failed.extend(record for record in records if record.failure and not record.is_peer)
        store.file_away(results, records)

    try:
        left = run(stale, session, origin, Clock(limit), keep, _plain(console))
    except KeyboardInterrupt:
        console.print("stopped; what was measured is filed, and the next run goes on from there")
        raise typer.Exit(130) from None
    finally:
        store.file_away(results, ceiling_records(session, origin))
    for record in failed:
        console.print(
            f"[red]failed:[/] {escape(' '.join(filter(None, record.key)))}: {escape(_first_line(record))}"
        )
    if left:
        console.print(f"{len(left)} units are left, about {duration(sum(state.seconds for state in left))}")
    console.print("escalade tables brings README and docs up to date")
    if failed:
        raise typer.Exit(1)


def _plain(console: Console) -> Say:
    return lambda text: console.print(escape(text))


def _first_line(record: Record) -> str:
    return record.failure.splitlines()[0]


def _list(found: Sequence[State], console: Console) -> None:
    for state in found:
        unit = state.unit
        console.print(
            f"[bold]{escape(unit.name)}[/]: {escape(unit.what)}; {duration(state.seconds)}; "
            f"{escape(state.why or 'up to date')}\n    {escape(unit.command)}"
        )
    _summary(found, console)


def _say_stale(found: Sequence[State], console: Console) -> None:
    for state in ordered(found):
        console.print(f"{escape(state.unit.name)}: {escape(state.why)}")
    _summary(found, console)


def _summary(found: Sequence[State], console: Console) -> None:
    """How much there is and is to be done, by kind."""
    stale = [state for state in found if state.stale]
    kinds = Counter(state.unit.kind for state in stale)
    of = ", ".join(f"{kind} {count}" for kind, count in kinds.items())
    for state in found:
        if state.failure and not state.stale:
            console.print(
                f"{escape(state.unit.name)} failed; with --again it is tried again: {escape(state.failure)}"
            )
    for why in filter(None, (coverage.missing(), evaluation.missing())):
        console.print(f"[yellow]note:[/] {escape(why)}")
    console.print(
        f"{len(stale)} of {len(found)} units are missing or overtaken{f' ({of})' if of else ''}, "
        f"about {duration(sum(state.seconds for state in stale))}"
    )
