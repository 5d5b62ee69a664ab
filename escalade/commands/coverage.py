"""The command `coverage`: every network of a module, compiled or why not, right, and beside PyTorch."""

from __future__ import annotations

import pathlib
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape

from escalade.bench.coverage.catalogue import Entry, entries
from escalade.bench.coverage.run import Clock, Coverage, LostDevice, left_over
from escalade.bench.coverage.together import measure_together
from escalade.bench.networks.judging import MOST
from escalade.bench.peers import registry
from escalade.bench.peers.comparison import COVERAGE
from escalade.commands.devices import network_device
from escalade.commands.options import (
    LARGEST_SIDE,
    Dtypes,
    NetworkOn,
    RecordsFile,
    RecordsFolder,
    count,
    duration,
    listed,
    numbers,
    seed_option,
)
from escalade.commands.progress import status
from escalade.errors import UnsupportedError
from escalade.measure import ceilings as card
from escalade.measure import records as store
from escalade.measure.records import Record
from escalade.report import terminal
from escalade.report.pages import coverage as tables

DTYPES = tuple(dtype for dtype in MOST if dtype != "fp8")
LAYOUTS = ("nhwc", "nchw")
_LOG_WIDTH = 160
_CEILING_SECONDS = 0.1


def command(
    networks: Annotated[
        str,
        typer.Argument(
            help="torchvision, or any module of constructors: MODULE or MODULE:name,name. Unasked, functions are "
            "called only if their annotation says that they give an nn.Module.",
            show_default=False,
        ),
    ],
    only: Annotated[
        str | None,
        typer.Option(help="Only the networks whose names this expression finds.", show_default=False),
    ] = None,
    dtype: Dtypes = None,
    batch: Annotated[
        list[str] | None,
        typer.Option("--batch", "-b", help="Batch sizes; 1,32 without it.", show_default=False),
    ] = None,
    size: Annotated[
        int | None,
        count(
            "--size",
            most=LARGEST_SIDE,
            help="Of the images; without it 224, or what a network was made for. A constructor that takes something "
            "else says the sizes of one item as its example_shape.",
            show_default=False,
        ),
    ] = None,
    layout: Annotated[
        str,
        typer.Option(
            help="How images come, to Escalade and its peers: nhwc (channels_last), or nchw as they are."
        ),
    ] = "nhwc",
    peers: Annotated[
        list[str] | None,
        typer.Option(
            help="torch-graph, torch-compile-default, torch-compile (max-autotune: minutes a network); all, none. "
            "Without it: torch-graph.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[float, duration("How long to measure each system.")] = 0.1,
    budget: Annotated[
        float | None,
        duration(
            "Seconds for the whole run: no network is begun that would not end in time, and what is left is said.",
            show_default=False,
        ),
    ] = None,
    jobs: Annotated[
        int,
        count(
            "--jobs",
            "-j",
            help="Networks that are prepared at once, each in a process of its own; while one is timed the others "
            "stand still.",
        ),
    ] = 1,
    timed: Annotated[
        bool,
        typer.Option(
            "--time/--no-time", help="Run and time the plans; without, they are made as for an H200."
        ),
    ] = True,
    device: NetworkOn = None,
    seed: Annotated[int, seed_option("Of the random weights and images.")] = 0,
    json: RecordsFile = None,
    results: RecordsFolder = None,
) -> None:
    """Every network of a module: compiled or why not, right, what PyTorch does of it, and its time beside PyTorch's."""
    console = Console()
    console = console if console.is_terminal else Console(width=_LOG_WIDTH)
    batches, dtypes = numbers("--batch", listed(batch)) or (1, 32), listed(dtype) or ("fp16", "tf32")
    _check(dtypes, layout)
    beside = registry.chosen(listed(peers), registry.NETWORKS)
    where = network_device(device) if timed else torch.device("cpu")
    found = entries(networks, only)
    if where.type != "cuda":
        beside = {}
        console.print(
            "On the CPU: PyTorch's operators run the plans, without kernels or peers. [yellow]Times are this CPU's.[/]"
            if timed
            else "Plans as an H200 would have them: [yellow]nothing is run.[/]"
        )
    run = _Run(console, where, json, results, timed)
    with status(console) as say:
        coverage = Coverage(
            _workload(networks, layout), where, batches, dtypes, beside, seconds, seed, size, run.ceilings(), timed,
            layout,
        )  # fmt: skip
        clock = Clock(budget)
        if jobs == 1:
            pieces = coverage.each(found, clock, say)
        else:
            pieces = measure_together(coverage, networks, found, jobs, clock, say)
        left = _measure(pieces, found, run)
    run.show()
    if left:
        console.print(
            f"[yellow]not measured:[/] {len(left)} of {len(found)} networks, for want of time or after an "
            f"error. The rest: --only {escape(repr(left_over(left)))}"
        )
    if any(record.failure and not record.is_peer for record in run.records):
        raise typer.Exit(1)


def _measure(pieces: Iterator[tuple[Entry, list[Record]]], found: Sequence[Entry], run: _Run) -> list[Entry]:
    """Keeps what comes; the networks that were not measured."""
    done = set()
    try:
        for entry, records in pieces:
            run.keep(records)
            done.add(entry.name)
    except LostDevice as lost:
        run.note(str(lost))
    return [entry for entry in found if entry.name not in done]


def _workload(networks: str, layout: str) -> str:
    """The records of each layout are apart, as a peer's would take each other's place."""
    module = networks.partition(":")[0]
    return f"{COVERAGE}{module}" if layout == LAYOUTS[0] else f"{COVERAGE}{module}_{layout}"


def _check(dtypes: Sequence[str], layout: str) -> None:
    if layout not in LAYOUTS:
        raise UnsupportedError(f"there is no layout {layout!r} here; there is {' and '.join(LAYOUTS)}")
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise UnsupportedError(f"there is no dtype {dtype!r} here; there is {', '.join(DTYPES)}")


@dataclass
class _Run:
    """One run: every network's records are filed as soon as they are there."""

    console: Console
    device: torch.device
    json: pathlib.Path | None
    results: pathlib.Path | None
    timed: bool
    records: list[Record] = field(default_factory=list)

    def __post_init__(self) -> None:
        origin = store.provenance(self.device)
        here = f"cpu {platform.machine()}" if self.timed else "no GPU: plans for an H200"
        self._origin = origin if self.device.type == "cuda" else replace(origin, gpu=here)

    def ceilings(self) -> card.Ceilings | None:
        """What the card can do, measured if there is one."""
        if self.device.type != "cuda":
            return None
        found = card.measure(self.device, _CEILING_SECONDS)
        self.console.print(terminal.ceilings_line(found))
        return found

    def keep(self, records: Sequence[Record]) -> None:
        """Files the records, and says what came of them: a run that is stopped keeps what it has."""
        stamped = [record.stamped(self._origin) for record in records]
        self.records += stamped
        if self.json:
            store.write(self.json, stamped)
        if self.results:
            store.file_away(self.results, stamped)
        for line in tables.lines(stamped):
            self.console.print(escape(line))

    def note(self, text: str) -> None:
        self.console.print(f"[red]stopped:[/] {escape(text)}")

    def show(self) -> None:
        for part in tables.parts(self.records):
            self.console.print(part.table)
            self.console.print(escape(f"{part.title}: {part.summary()}"))
