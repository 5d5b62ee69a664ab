"""Report and run the units of a campaign, for `escalade measure`."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Sequence
from dataclasses import replace

import torch
import typer
from rich.console import Console
from rich.markup import escape

from escalade.commands.progress import Say
from escalade.terminal_text import counted
from escalade_bench import evaluation
from escalade_bench.campaign.runner import (
    Campaign,
    Clock,
    ceiling_records,
    duration,
    expected_seconds,
    ordered,
)
from escalade_bench.campaign.staleness import WORKLOAD, State
from escalade_bench.campaign.units import Session
from escalade_bench.coverage import run as coverage
from escalade_bench.measure import records as store
from escalade_bench.measure.currency import package_digest
from escalade_bench.measure.records import Record
from escalade_bench.peers.registry import PEERS
from escalade_bench.report.tables import PREFERRED_GPU

_WITHOUT_KERNELS = (WORKLOAD, "ceilings", "gpu_test")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def mark_older(
    found: Sequence[State], known: Sequence[Record], results: pathlib.Path, console: Console
) -> None:
    """Write into each record of ours why it is no longer current."""
    older = {key: why for state in found for key, why in (state.older or {}).items()}
    changed = []
    for record in known:
        own = not record.is_peer and not record.is_on_twin and record.workload not in _WITHOUT_KERNELS
        why = older.get(
            record.key, record.older if record.plan else "measured before machine code was recorded"
        )
        checked = package_digest() if record.key in older else record.checked
        if own and (why, checked) != (record.older, record.checked):
            changed.append(replace(record, older=why, checked=checked))
    store.file_away(results, changed)
    console.print(
        f"{counted(len(changed), 'record')} marked anew; {sum(map(bool, older.values()))} of {len(older)} are older"
    )


def parse_budget(text: str | None) -> float | None:
    """`540`, `540s`, `9m`, `1.5h` in seconds."""
    if text is None:
        return None
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip())
    if parts is None or parts[2] not in _SECONDS:
        raise typer.BadParameter(
            f"{text!r} is not a duration; write 540, 540s, 9m or 1h", param_hint="--budget"
        )
    return float(parts[1]) * _SECONDS[parts[2]]


def card_folder(here: bool) -> str:
    return store.gpu_folder(torch.cuda.get_device_name()) if here else PREFERRED_GPU


def measure_units(
    stale: list[State], architecture: str, limit: float | None, results: pathlib.Path, console: Console
) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    origin = store.provenance(device)
    session = Session(device)
    failed: list[Record] = []
    for peer in PEERS:
        if peer.refusal:
            console.print(f"[yellow]without {escape(peer.title)}:[/] {escape(peer.refusal)}")

    def keep(records: Sequence[Record]) -> None:
        failed.extend(record for record in records if record.failure and not record.is_peer)
        store.file_away(results, records)

    try:
        left = Campaign(session, architecture, origin, keep, _plain(console)).run(stale, Clock(limit))
    except KeyboardInterrupt:
        console.print("stopped; finished measurements are saved, and the next run continues from there")
        raise typer.Exit(130) from None
    finally:
        store.file_away(results, ceiling_records(session, origin))
    for record in failed:
        console.print(
            f"[red]failed:[/] {escape(' '.join(filter(None, record.key)))}: {escape(_first_line(record))}"
        )
    if left:
        console.print(f"{counted(len(left), 'unit')} left, about {duration(expected_seconds(left))}")
    console.print("escalade report tables brings README and docs up to date")
    if failed:
        raise typer.Exit(1)


def _plain(console: Console) -> Say:
    return lambda text: console.print(escape(text))


def _first_line(record: Record) -> str:
    return record.failure.splitlines()[0]


def print_stale(found: Sequence[State], console: Console) -> None:
    for state in ordered(found):
        console.print(f"{escape(state.unit.name)}: {escape(state.why)}")
    print_summary(found, console)


def print_summary(found: Sequence[State], console: Console) -> None:
    """Print how many units are current, and how long the others should take."""
    stale = [state for state in found if state.stale]
    for state in found:
        if state.failure and not state.stale:
            console.print(
                f"{escape(state.unit.name)} failed; with --again it is tried again: {escape(state.failure)}"
            )
    for why in filter(None, (coverage.missing(), evaluation.missing())):
        console.print(f"[yellow]note:[/] {escape(why)}")
    share = 100 * (len(found) - len(stale)) // max(1, len(found))
    console.print(
        f"{len(found) - len(stale)} of {len(found)} units are current ({share}%); the others take about "
        f"{duration(expected_seconds(stale))}"
    )
