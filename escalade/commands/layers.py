"""The command `layers`: single convolutions beside their peers."""

from __future__ import annotations

import pathlib
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape

from escalade import ops
from escalade.bench.ladder import Say, free
from escalade.bench.layers import sets, summaries
from escalade.bench.layers.measurement import measure, programs
from escalade.bench.layers.sets import Layer, Part
from escalade.bench.peers import registry
from escalade.bench.trial import Settings, blank_record
from escalade.commands.devices import kernel_device
from escalade.commands.options import (
    Dtypes,
    InputSeed,
    KernelsOn,
    RecordsFile,
    RecordsFolder,
    duration,
    listed,
    numbers,
)
from escalade.commands.progress import status
from escalade.device.cuda import architecture
from escalade.device.precompilation import precompile
from escalade.errors import UnsupportedError
from escalade.measure import ceilings as card
from escalade.measure import records as store
from escalade.measure.records import Record
from escalade.ops.conv2d.problem import DTYPES
from escalade.report import terminal
from escalade.report.pages.layers import table as layers_table

CEILING_SECONDS = 0.1
LOG_WIDTH = 160


def command(
    names: Annotated[
        list[str],
        typer.Argument(
            help="Sets of layers: resnet18, resnet50, stem, depthwise, untuned; or convolutions such as "
            "64to64_56_k3s1_b256_bias+relu.",
            show_default=False,
        ),
    ],
    batch: Annotated[
        list[str] | None,
        typer.Option("--batch", "-b", help="Batch sizes such as 32,256; 256 without it.", show_default=False),
    ] = None,
    dtype: Dtypes = None,
    direction: Annotated[
        str, typer.Option("--direction", "-d", help="forward, input_gradient or weight_gradient.")
    ] = "forward",
    peers: Annotated[
        list[str] | None,
        typer.Option(
            help="cudnn-graph (the best plan of cuDNN; needs nvidia-cudnn-frontend), torch, torch-compile ("
            "tens of seconds a layer); none. Without it: the first two.",
            show_default=False,
        ),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option(help="Search the fastest config of all preferred rungs, instead of what a call takes."),
    ] = False,
    device: KernelsOn = None,
    seconds: Annotated[float, duration("How long to measure each system.")] = 0.05,
    seed: InputSeed = 0,
    json: RecordsFile = None,
    results: RecordsFolder = None,
) -> None:
    """Single convolutions beside their peers, in one run: verified, then timed in turns, layer by layer."""
    console = _console()
    batches, dtypes, asked_peers = numbers("--batch", listed(batch)), listed(dtype), listed(peers)
    where = kernel_device(device)
    chosen = tuple(registry.chosen(asked_peers, registry.LAYERS))
    wanted = wanted_parts(names, batches, dtypes, direction)
    distinct = {layer.key: layer for part in wanted for layer in part.layers}
    if not distinct:
        raise UnsupportedError(
            f"{', '.join(names)} has no layers in direction {direction}: there is nothing to measure"
        )
    workload = "layers" if direction == "forward" else f"layers_{direction}"
    settings = Settings(tune=tune, seed=seed, seconds_each=seconds)
    run = _Run(workload, settings, console, where, json, results)
    if where.type == "cuda":
        run.prepare(list(distinct.values()))
    else:
        console.print("On the twin: results are checked, and [yellow]nothing here is a speed.[/]")
    for key, layer in distinct.items():
        with status(console) as say:
            run.measured[key] = run.measure(layer, chosen, say)
    for part in wanted:
        run.show(part)
    run.show_fp8(wanted)
    run.file_ceilings()
    if not any(run.measured.values()):
        raise UnsupportedError(
            "none of these layers can be done here, so nothing was measured; the notes say why"
        )
    failures = [record for records in run.measured.values() for record in records if record.failure]
    for why, count in Counter(f"{r.system}: {r.failure}" for r in failures if r.is_peer).items():
        run.note(f"{why} ({count} layers)" if count > 1 else why)
    failed = [record for record in failures if not record.is_peer]
    for record in failed:
        console.print(f"[red]failed:[/] {escape(terminal.failure(record))}")
    if failed:
        raise typer.Exit(1)


def _console() -> Console:
    """The console; in a log, which has no width of its own, it is wide enough for the table."""
    console = Console()
    return console if console.is_terminal else Console(width=LOG_WIDTH)


def wanted_parts(
    names: Sequence[str], batches: tuple[int, ...], dtypes: tuple[str, ...], direction: str
) -> tuple[Part, ...]:
    """The layers to measure, in parts that have a table each; empty batches and dtypes stand for the usual."""
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise UnsupportedError(f"there is no dtype {dtype!r} here; there is {', '.join(DTYPES)}")
    return sets.parts(tuple(names), batches or (256,), dtypes or ("fp16",), direction)


@dataclass
class _Run:
    """One run: what it has found is filed after every layer."""

    workload: str
    settings: Settings
    console: Console
    device: torch.device
    json: pathlib.Path | None
    results: pathlib.Path | None
    measured: dict[tuple[str, object], list[Record]] = field(default_factory=dict)
    ceilings: card.Ceilings | None = None

    def __post_init__(self) -> None:
        self._origin = store.provenance(self.device)

    def note(self, text: str) -> None:
        self.console.print(f"[yellow]note:[/] {escape(text)}")

    def prepare(self, wanted: Sequence[Layer]) -> None:
        """Compiles everything, in parallel, and measures what the card can do."""
        here = architecture(self.device.index or 0)
        kernels = programs(wanted, self.device, self.settings.tune)
        self.console.print(f"compiling {len(kernels)} kernels for {here}")
        for failure in precompile(kernels, here):
            self.console.print(f"[red]refused:[/] {escape(failure.message.splitlines()[0])}")
        self.ceilings = card.measure(self.device, CEILING_SECONDS)
        self.console.print(terminal.ceilings_line(self.ceilings))

    def measure(self, layer: Layer, peers: Sequence[str], say: Say) -> list[Record]:
        try:
            found = measure(
                layer, self.device, peers, self.settings, self.ceilings, self.workload, say, self.note
            )
        except RuntimeError as error:  # out of memory, a launch that fails: the other layers go on
            reason = str(error).strip() or type(error).__name__
            blank = blank_record(ops.operation(layer.operation), layer.problem, "escalade", "")
            found = [replace(blank, workload=self.workload, failure=reason.splitlines()[0])]
            free(self.device)
        records = [record.stamped(self._origin) for record in found]
        if self.json:
            store.write(self.json, records)
        if self.results:
            store.file_away(self.results, records)
        return records

    def show(self, part: Part) -> None:
        if self.device.type != "cuda":
            records = [record for layer in part.layers for record in self.measured[layer.key]]
            for one in terminal.ladder_tables(records):
                self.console.print(one)
            return
        found = summaries.rows(part.layers, self.measured)
        self.console.print(layers_table(part.title, found))
        own = [record for layer in part.layers for record in self.measured.get(layer.key, ())]
        if line := terminal.conditions_line(record.conditions for record in own):
            self.console.print(line, highlight=False)
        total = summaries.summary(found)
        if total:
            self.console.print(f"{part.title}: {total}")
        if self.ceilings:
            rates = ", ".join(f"{dtype} {rate:.0f}" for dtype, rate in self.ceilings.tflops.items())
            self.console.print(f"the best of several matrix products in the same run, TFLOP/s: {rates}")

    def show_fp8(self, wanted: Sequence[Part]) -> None:
        every = {layer.key: layer for part in wanted for layer in part.layers}
        compared = summaries.over_fp16(summaries.rows(every.values(), self.measured))
        for row, ratio in compared:
            self.console.print(f"fp8 {row.layer.problem.name}: {ratio:.2f}× our fp16")
        if compared:
            mean = statistics.geometric_mean(ratio for _, ratio in compared)
            self.console.print(f"fp8 over our own fp16: {mean:.3f}× in the geometric mean")

    def file_ceilings(self) -> None:
        if self.ceilings and self.results:
            found = [record.stamped(self._origin) for record in card.records(self.ceilings)]
            store.file_away(self.results, found)
