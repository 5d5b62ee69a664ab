"""State of a measuring command: stamp and save records immediately, and print them with their failures at the end."""

from __future__ import annotations

import pathlib
import platform
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import typer
from rich.console import Console
from rich.markup import escape

from escalade_bench.measure import ceilings as card
from escalade_bench.measure import records as store
from escalade_bench.measure.records import Record
from escalade_bench.report import terminal

LOG_WIDTH = 160
"""Columns of output that is not a terminal, where rich assumes 80."""
ON_CPU = f"cpu {platform.machine()}"
"""GPU name in records of PyTorch's operators on the CPU."""


def wide_console() -> Console:
    """Return a console that is wide enough for large tables even if it is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=LOG_WIDTH)


class Run:
    """Records of one command so far, and where they are filed."""

    def __init__(
        self,
        device: torch.device,
        json: pathlib.Path | None = None,
        results: pathlib.Path | None = None,
        console: Console | None = None,
        without_gpu: str = "",
    ) -> None:
        self.device, self.json, self.results = device, json, results
        self.console = console or Console()
        self.records: list[Record] = []
        self.ceilings: card.Ceilings | None = None
        origin = store.provenance(device)
        self._origin = replace(origin, gpu=without_gpu) if without_gpu and device.type != "cuda" else origin

    def measure_ceilings(self, *seconds: float) -> card.Ceilings | None:
        """Measure and print the card's ceilings. Return None without a GPU."""
        if self.device.type == "cuda":
            self.ceilings = card.measure(self.device, *seconds)
            self.console.print(terminal.ceilings_line(self.ceilings))
        return self.ceilings

    def keep(self, records: Iterable[Record]) -> list[Record]:
        """Stamp and save records immediately, so that an interrupted run does not lose them."""
        stamped = [record.stamped(self._origin) for record in records]
        self.records += stamped
        if self.json:
            store.write(self.json, stamped)
        if self.results:
            store.file_away(self.results, stamped)
        return stamped

    def note(self, text: str) -> None:
        self.console.print(f"[yellow]note:[/] {escape(text)}")

    def show(self, tables: Iterable[Any], records: Sequence[Record] | None = None) -> None:
        """Print tables, the card's clock and temperature during the run, and every failure."""
        for table in tables:
            self.console.print(table)
        shown = self.records if records is None else records
        if line := terminal.conditions_line(record.conditions for record in shown):
            self.console.print(line, highlight=False)
        self.show_failures(shown)

    def show_failures(self, records: Iterable[Record]) -> None:
        for record in records:
            if record.failure and record.is_peer:
                self.note(terminal.failure(record))
            elif record.failure:
                self.console.print(f"[red]failed:[/] {escape(terminal.failure(record))}")

    def end(self) -> None:
        """Save the ceilings; exit with status 1 if a record of ours is a failure."""
        if self.ceilings and self.results:
            store.file_away(self.results, [r.stamped(self._origin) for r in card.records(self.ceilings)])
        failed = sum(bool(record.failure) and not record.is_peer for record in self.records)
        if failed:
            self.console.print(f"[red]{failed} failed; they were not timed.[/]")
            raise typer.Exit(1)
