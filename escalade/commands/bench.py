"""What the commands `bench` and `explain` do, with progress on the terminal."""

from __future__ import annotations

import pathlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.markup import escape

from escalade import files, models
from escalade.bench.networks.judging import MOST
from escalade.bench.networks.steps import time_steps
from escalade.bench.networks.workload import Say, Setting, Workload
from escalade.bench.networks.workloads import workload
from escalade.bench.peers import registry
from escalade.commands.ladder import status
from escalade.engine import compile, load
from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.engine.explain import explain_plan
from escalade.engine.graph.graph import fixed
from escalade.engine.plan.program import KernelProgram
from escalade.errors import UnsupportedError
from escalade.measure import ceilings as card
from escalade.measure import records as store
from escalade.measure.records import Record
from escalade.report import networks as tables
from escalade.report import terminal

DTYPES = tuple(MOST)


@dataclass(frozen=True)
class BenchOptions:
    """Empty stands for the usual."""

    workload: str
    batches: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    device: str | None = None
    seconds: float = 0.3
    phases: bool = True
    stream: bool = False
    size: int | None = None
    seed: int = 0
    json: pathlib.Path | None = None
    results: pathlib.Path | None = None
    plot: pathlib.Path | None = None


def network_device(name: str | None) -> torch.device:
    """`cuda` (the default where there is a GPU) or `cpu`."""
    if name == "cpu" or (name is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UnsupportedError(
            "--device cuda needs an NVIDIA GPU that PyTorch can use, and there is none; `escalade doctor` says why, "
            "and --device cpu runs PyTorch's operators instead of kernels"
        )
    return torch.device("cuda", torch.cuda.current_device())


def bench(options: BenchOptions, console: Console | None = None) -> int:
    """0 if every result was right."""
    console = console or Console()
    chosen = workload(options.workload)
    peers = registry.chosen(options.peers, chosen.peers)
    device = network_device(options.device)
    _check(options, chosen)
    parts = _parts(options, chosen, device)
    batches = options.batches or (chosen.batches if device.type == "cuda" else chosen.small_batches)
    slow_batches = () if options.batches else chosen.slow_batches
    if device.type != "cuda":
        peers = {}
        console.print(
            f"On the CPU, batch {', '.join(map(str, batches))}: PyTorch's operators run the plan, without "
            "kernels, graphs or peers. [yellow]Times are this CPU's.[/]"
        )
    if slow_batches and any(name in registry.SLOW for name in peers):
        console.print(
            f"{', '.join(registry.SLOW)} takes part at batches {', '.join(map(str, slow_batches))} only, because it is "
            "slow to make; with --batch it takes part at those that are named."
        )
    if chosen.notice():
        console.print(f"[yellow]note:[/] {escape(chosen.notice())}")
    run = _Run(options, console, device)
    with status(console) as say:
        say(f"{chosen.name}: making the network")
        size = options.size or chosen.size
        model = chosen.model(size, options.seed)
        setting = Setting(
            chosen,
            model,
            capture(model, (chosen.inputs(2, size, options.seed),)),
            device,
            size,
            batches,
            options.dtypes or (chosen.dtypes if device.type == "cuda" else ("fp32",)),
            peers,
            slow_batches,
            options.seconds,
            options.seed,
            run.ceilings(say),
        )
        for name in parts:
            for records in chosen.parts[name].measure(setting, say):
                run.keep(records)
    run.show()
    return 1 if any(record.failure and not record.is_peer for record in run.records) else 0


def _check(options: BenchOptions, chosen: Workload) -> None:
    for dtype in options.dtypes:
        if dtype not in DTYPES:
            raise UnsupportedError(f"there is no dtype {dtype!r} here; there is {', '.join(DTYPES)}")
    for batch in options.batches:
        if batch < 1:
            raise UnsupportedError(f"a batch of {batch}: it must be at least 1")
    if options.size is None or options.size == chosen.size:
        return
    if chosen.smallest is None:
        raise UnsupportedError(f"inputs of {options.size}: {chosen.name} takes {chosen.size} only")
    if options.size < chosen.smallest:
        raise UnsupportedError(f"images of {options.size}: these networks take {chosen.smallest} or more")


def _parts(options: BenchOptions, chosen: Workload, device: torch.device) -> tuple[str, ...]:
    """Those named, or the usual ones that can be measured here; `--stream` and `--no-phases` on top."""
    named = {*options.parts, *(("stream",) if options.stream else ())}
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
    wanted = named if options.parts else named | usual
    if not options.phases:
        wanted.discard("phases")
    if not wanted:
        raise UnsupportedError(
            f"no part is left to measure here; {chosen.name} has {', '.join(chosen.parts)}"
            + ("" if on_gpu else ", some of them on a GPU only")
        )
    return tuple(name for name in chosen.parts if name in wanted)


class _Run:
    """One run of `bench`: what it has found so far is filed after every part."""

    def __init__(self, options: BenchOptions, console: Console, device: torch.device) -> None:
        self.records: list[Record] = []
        self._options = options
        self._device = device
        self._console = console
        origin = store.provenance(device)
        self._origin = origin if device.type == "cuda" else replace(origin, gpu=f"cpu {platform.machine()}")
        self._ceilings: card.Ceilings | None = None

    def ceilings(self, say: Say) -> card.Ceilings | None:
        """Of the GPU, if there is one."""
        if self._device.type == "cuda":
            say("measuring the card's ceilings")
            self._ceilings = card.measure(self._device)
            self._console.print(terminal.ceilings_line(self._ceilings))
        return self._ceilings

    def keep(self, records: Sequence[Record]) -> None:
        """A run that is stopped keeps what it has."""
        stamped = [record.stamped(self._origin) for record in records]
        self.records += stamped
        if self._options.json:
            store.write(self._options.json, stamped)
        if self._options.results:
            store.file_away(self._options.results, stamped)

    def show(self) -> None:
        for part in tables.network_tables(self.records):
            self._console.print(part)
        for record in self.records:
            if record.failure:
                kind = "[yellow]note:[/]" if record.is_peer else "[red]failed:[/]"
                self._console.print(f"{kind} {escape(tables.failure(record))}")
        if self._ceilings and self._options.results:
            found = [record.stamped(self._origin) for record in card.records(self._ceilings)]
            store.file_away(self._options.results, found)
        if self._options.plot:
            from escalade.report.network_plot import network_plot

            written = network_plot(self.records, self._options.workload, self._options.plot)
            self._console.print(f"wrote {escape(str(written))}")


@dataclass(frozen=True)
class ExplainOptions:
    model: str
    """A name, or the file of a saved engine."""
    batch: int = 1
    dtype: str | None = None
    device: str | None = None
    time: bool = False
    json: pathlib.Path | None = None


def explain(options: ExplainOptions, console: Console | None = None) -> int:
    console = console or Console()
    device = network_device(options.device)
    if options.time and device.type != "cuda":
        raise UnsupportedError("--time measures on a GPU, and there is none")
    if options.batch < 1:
        raise UnsupportedError(f"a batch of {options.batch}: it must be at least 1")
    engine, inputs = _network(options, device)
    program = engine.program(*inputs)
    if isinstance(program, KernelProgram) and options.time:
        console.print("measuring the card's ceilings, then the steps")
        explanation = explain_plan(program.plan, card.measure(device).floor_us)
        explanation = explanation.with_times(*time_steps(program, inputs, device))
    else:
        explanation = explain_plan(program.plan)
    if device.type != "cuda":
        note = "This is the plan without a GPU's limits; on the CPU PyTorch runs every step of it."
        explanation = replace(explanation, notes=(*explanation.notes, note))
    explanation = replace(explanation, title=options.model)
    console.print(explanation)
    if options.json:
        files.replace(options.json, (explanation.to_json() + "\n").encode())
        console.print(f"wrote {escape(str(options.json))}")
    return 0


def _network(options: ExplainOptions, device: torch.device) -> tuple[Engine, tuple[torch.Tensor, ...]]:
    """A network of that name with random weights, or the engine of a file."""
    if options.model in models.MODELS:
        model, _ = models.model(options.model)
        x = models.example(options.model, options.batch).to(device)
        dtype = options.dtype or "fp16"
        calibration = [x] if dtype == "fp8" else None
        return compile(model, x, dtype=dtype, device=device, calibration=calibration), (x,)
    if not pathlib.Path(options.model).is_file():
        raise UnsupportedError(
            f"{options.model!r} is neither a model ({', '.join(models.MODELS)}) nor the file of a saved engine"
        )
    engine = load(options.model, device=device)
    if options.dtype not in (None, engine.dtype):
        raise UnsupportedError(
            f"{options.model} was compiled for {engine.dtype}; for {options.dtype} compile its model again"
        )
    inputs = tuple(
        torch.zeros(fixed(given.shape, options.batch), dtype=getattr(torch, given.dtype), device=device)
        for given in engine.graph.inputs
    )
    return engine, inputs
