"""The command `bench`: a network beside its peers."""

from __future__ import annotations

import pathlib
import platform
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.markup import escape

from escalade.bench.networks.judging import MOST
from escalade.bench.networks.workload import Say, Setting, Workload
from escalade.bench.networks.workloads import workload as named_workload
from escalade.bench.peers import registry
from escalade.bench.peers.network import Budget
from escalade.bench.peers.registry import SLOW
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
    written,
)
from escalade.commands.progress import status
from escalade.device import room
from escalade.engine.capture.export import capture
from escalade.errors import UnsupportedError
from escalade.measure import ceilings as card
from escalade.measure import records as store
from escalade.measure.records import Record
from escalade.report import terminal
from escalade.report.pages import networks as tables
from escalade.report.plots import PICTURES, by_batch, save

DTYPES = tuple(MOST)


def command(
    workload: Annotated[
        str,
        typer.Argument(
            help="resnet18, resnet34, resnet50, autoencoder, lenet or spectral_autoencoder; a constructor as "
            "MODULE:name; or a .pt2 file of torch.export.",
            show_default=False,
        ),
    ],
    batch: Annotated[
        list[str] | None,
        typer.Option(
            "--batch", "-b", help="Batch sizes such as 1,8,32; may be repeated.", show_default=False
        ),
    ] = None,
    dtype: Dtypes = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            help="torch-eager, torch-graph, torch-compile (max-autotune: 90 s a batch and more), "
            "torch-compile-default, jax; all, none. Without it: the quick ones.",
            show_default=False,
        ),
    ] = None,
    parts: Annotated[
        list[str] | None,
        typer.Option(
            help="Only these: accuracy, batches; training-step (ResNets and autoencoders), "
            "training-ablation, training-pairs (autoencoder); phases, cpu, layer-kinds, stream (ResNets); "
            "op-times, stream (lenet); score (spectral_autoencoder). Without it: the usual ones.",
            show_default=False,
        ),
    ] = None,
    device: NetworkOn = None,
    seconds: Annotated[float, duration("How long to measure each system.")] = 0.3,
    budget: Annotated[
        float | None,
        duration(
            "Seconds in which torch.compile may be begun; what it is too late for is recorded as that.",
            show_default=False,
        ),
    ] = None,
    phases: Annotated[bool, typer.Option(help="One image from the naive kernels to the engine.")] = True,
    stream: Annotated[
        bool, typer.Option(help="Also uint8 images from host memory, as a part of its own.")
    ] = False,
    size: Annotated[
        int | None,
        count(
            "--size",
            help="Of the images, for ResNets; 224 without it.",
            most=LARGEST_SIDE,
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, seed_option("Of the random weights and images.")] = 0,
    json: RecordsFile = None,
    results: RecordsFolder = None,
    plot: Annotated[
        pathlib.Path | None,
        written("--plot", help="Draw the figures into this .png, .svg or .pdf file.", endings=PICTURES),
    ] = None,
) -> None:
    """A network beside its peers, in one run: verified, then timed for every batch size and dtype."""
    console = Console()
    batches, dtypes = numbers("--batch", listed(batch)), listed(dtype)
    asked_peers, asked_parts = listed(peers), listed(parts)
    chosen = named_workload(workload)
    beside = registry.chosen(asked_peers, chosen.peers)
    where = network_device(device)
    _check(dtypes, size, chosen)
    named = {*asked_parts, *(("stream",) if stream else ())}
    measured = _parts(named, not asked_parts, phases, chosen, where)
    slow_batches = () if batches else chosen.slow_batches
    batches = batches or (chosen.batches if where.type == "cuda" else chosen.small_batches)
    if where.type != "cuda":
        beside = {}
        console.print(
            f"On the CPU, batch {', '.join(map(str, batches))}: PyTorch's operators run the plan, without "
            "kernels, graphs or peers. [yellow]Times are this CPU's.[/]"
        )
    slow = [name for name in beside if name in SLOW]
    if slow_batches and slow:
        console.print(
            f"{', '.join(slow)}: at batches {', '.join(map(str, slow_batches))} only, because of the time that it "
            "takes to make; with --batch at those that are named."
        )
    if chosen.notice():
        console.print(f"[yellow]note:[/] {escape(chosen.notice())}")
    run = _Run(console, where, json, results)
    with status(console) as say:
        say(f"{chosen.name}: making the network")
        size = size or chosen.size
        model = chosen.model(size, seed)
        pair = chosen.inputs(2, size, seed)
        room.require(max(batches) * pair[0].nbytes, f"{chosen.name} for a batch of {max(batches):,}")
        setting = Setting(
            chosen,
            model,
            capture(model, (pair,)),
            where,
            size,
            batches,
            dtypes or (chosen.dtypes if where.type == "cuda" else ("fp32",)),
            beside,
            slow_batches,
            seconds,
            seed,
            run.ceilings(say),
            Budget(budget),
        )
        for name in measured:
            for records in chosen.parts[name].measure(setting, say):
                run.keep(records)
    run.show()
    if plot:
        timed = [record for record in run.records if record.workload == workload]
        console.print(f"wrote {escape(str(save(lambda: by_batch(timed, workload), plot)))}")
    if any(record.failure and not record.is_peer for record in run.records):
        raise typer.Exit(1)


def _check(dtypes: Sequence[str], size: int | None, chosen: Workload) -> None:
    for dtype in dtypes:
        if dtype not in DTYPES:
            raise UnsupportedError(f"there is no dtype {dtype!r} here; there is {', '.join(DTYPES)}")
        if dtype == "fp8" and dtype not in chosen.further_dtypes:
            raise UnsupportedError(
                f"{chosen.name} is measured in {', '.join(chosen.dtypes)}; fp8 is for ResNets"
            )
    if size is None or size == chosen.size:
        return
    if chosen.smallest is None:
        raise UnsupportedError(f"inputs of {size}: {chosen.name} takes {chosen.size} only")
    if size < chosen.smallest:
        raise UnsupportedError(f"images of {size}: these networks take {chosen.smallest} or more")


def _parts(
    named: set[str], with_usual: bool, phases: bool, chosen: Workload, device: torch.device
) -> tuple[str, ...]:
    """The parts that are named, and the usual ones that can be measured here; without phases if so asked."""
    for name in named:
        if name not in chosen.parts:
            raise UnsupportedError(f"{chosen.name} has no part {name!r}; it has {', '.join(chosen.parts)}")
    on_gpu = device.type == "cuda"
    if "stream" in named and not on_gpu:
        raise UnsupportedError("--stream measures copies to a GPU, and there is none")
    for name in named:
        if chosen.parts[name].needs_gpu and not on_gpu:
            raise UnsupportedError(f"{name} is measured on a GPU, and there is none")
    usual = {
        name
        for name, part in chosen.parts.items()
        if part.usual and (on_gpu or (part.usual_on_cpu and not part.needs_gpu))
    }
    wanted = named | usual if with_usual else set(named)
    if not phases:
        wanted.discard("phases")
    if not wanted:
        raise UnsupportedError(
            f"no part is left to measure here; {chosen.name} has {', '.join(chosen.parts)}"
            + ("" if on_gpu else ", some of them on a GPU only")
        )
    return tuple(name for name in chosen.parts if name in wanted)


class _Run:
    """One run of `bench`: what it has found so far is filed after every part."""

    def __init__(
        self,
        console: Console,
        device: torch.device,
        json: pathlib.Path | None,
        results: pathlib.Path | None,
    ) -> None:
        self.records: list[Record] = []
        self._json, self._results = json, results
        self._device = device
        self._console = console
        origin = store.provenance(device)
        self._origin = origin if device.type == "cuda" else replace(origin, gpu=f"cpu {platform.machine()}")
        self._ceilings: card.Ceilings | None = None

    def ceilings(self, say: Say) -> card.Ceilings | None:
        """What the card can do, measured if there is one."""
        if self._device.type == "cuda":
            say("measuring the card's ceilings")
            self._ceilings = card.measure(self._device)
            self._console.print(terminal.ceilings_line(self._ceilings))
        return self._ceilings

    def keep(self, records: Sequence[Record]) -> None:
        """Files the records: a run that is stopped keeps what it has."""
        stamped = [record.stamped(self._origin) for record in records]
        self.records += stamped
        if self._json:
            store.write(self._json, stamped)
        if self._results:
            store.file_away(self._results, stamped)

    def show(self) -> None:
        for part in tables.terminal_tables(self.records):
            self._console.print(part)
        if line := terminal.conditions_line(record.conditions for record in self.records):
            self._console.print(line, highlight=False)
        for record in self.records:
            if record.failure:
                kind = "[yellow]note:[/]" if record.is_peer else "[red]failed:[/]"
                self._console.print(f"{kind} {escape(terminal.failure(record))}")
        if self._ceilings and self._results:
            found = [record.stamped(self._origin) for record in card.records(self._ceilings)]
            store.file_away(self._results, found)
