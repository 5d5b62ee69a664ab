"""What the commands `bench` and `explain` do, with progress on the terminal."""

from __future__ import annotations

import pathlib
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from rich.console import Console
from rich.markup import escape

from escalade import models
from escalade.bench import ceilings as card
from escalade.bench import store
from escalade.bench.commands import status
from escalade.bench.ladder import free
from escalade.bench.networks import peers
from escalade.bench.networks.accuracy import Accuracy
from escalade.bench.networks.contender import TOLERANCE, Entry
from escalade.bench.networks.measure import Case, Say, measure
from escalade.bench.networks.phases import measure_phases
from escalade.bench.networks.steps import time_steps
from escalade.bench.networks.streaming import BATCHES as STREAM_BATCHES
from escalade.bench.networks.streaming import measure_stream
from escalade.bench.networks.workloads import SIZE, Workload, images, reference, workload
from escalade.bench.store import Record
from escalade.engine import compile, load
from escalade.engine.capture import capture
from escalade.engine.engine import Engine
from escalade.engine.explain import explain as explain_plan
from escalade.engine.graph import fixed
from escalade.engine.program import KernelProgram
from escalade.errors import UnsupportedError
from escalade.models import ResNet
from escalade.report import networks as tables
from escalade.report import terminal

BATCHES = (1, 4, 8, 16, 32, 64, 256)
DTYPES = tuple(TOLERANCE)
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_SMALLEST = 32
_ACCURACY_IMAGES = {"cuda": 64, "cpu": 2}


@dataclass(frozen=True)
class BenchOptions:
    """Empty stands for the usual."""

    workload: str
    batches: tuple[int, ...] = ()
    dtypes: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    device: str | None = None
    seconds: float = 0.3
    phases: bool = True
    stream: bool = False
    size: int = SIZE
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
    rivals = peers.chosen(options.peers)
    device = network_device(options.device)
    options = _checked(options, device)
    if device.type != "cuda":
        rivals = ()
        console.print(
            f"On the CPU, batch {', '.join(map(str, options.batches))}: PyTorch's operators run the plan, without "
            "kernels, graphs or peers. [yellow]Times are this CPU's.[/]"
        )
    run = _Run(chosen, options, rivals, device, console)
    with status(console) as say:
        run.everything(say)
    run.show()
    return 1 if any(record.failure for record in run.records) else 0


def _checked(options: BenchOptions, device: torch.device) -> BenchOptions:
    for dtype in options.dtypes:
        if dtype not in DTYPES:
            raise UnsupportedError(f"there is no dtype {dtype!r} here; there is {', '.join(DTYPES)}")
    for batch in options.batches:
        if batch < 1:
            raise UnsupportedError(f"a batch of {batch}: it must be at least 1")
    if options.size < _SMALLEST:
        raise UnsupportedError(f"images of {options.size}: these networks take {_SMALLEST} or more")
    on_gpu = device.type == "cuda"
    if options.stream and not on_gpu:
        raise UnsupportedError("--stream measures copies to a GPU, and there is none")
    return replace(
        options,
        batches=options.batches or (BATCHES if on_gpu else (1,)),
        dtypes=options.dtypes or (DTYPES if on_gpu else ("fp32",)),
        phases=options.phases and on_gpu,
    )


class _Run:
    """One run of `bench`: what it has found so far is filed after every part."""

    def __init__(
        self,
        chosen: Workload,
        options: BenchOptions,
        rivals: Sequence[str],
        device: torch.device,
        console: Console,
    ) -> None:
        self.records: list[Record] = []
        self._workload = chosen
        self._options = options
        self._rivals = rivals
        self._device = device
        self._console = console
        origin = store.provenance(device)
        self._origin = origin if device.type == "cuda" else replace(origin, gpu=f"cpu {platform.machine()}")
        self._ceilings: card.Ceilings | None = None

    def everything(self, say: Say) -> None:
        options, name = self._options, self._workload.name
        say(f"{name}: making the network")
        model = self._workload.model(options.size, options.seed)
        graph = capture(model, (images(2, options.size, options.seed),))
        if self._device.type == "cuda":
            say("measuring the card's ceilings")
            self._ceilings = card.measure(self._device)
            self._console.print(terminal.ceilings_line(self._ceilings))
        engines = {dtype: Engine(graph, dtype, self._device, plans=1) for dtype in options.dtypes}
        self._keep(self._accuracy(model, engines.values(), say))
        for batch in options.batches:
            x = images(batch, options.size, options.seed + 2).to(self._device)
            expected = reference(model, x)
            for dtype, engine in engines.items():
                case = Case(name, Entry(model, x, dtype), expected, options.seconds, self._ceilings)
                self._keep(measure(case, engine, self._rivals, say))
                free(self._device)
        if options.phases:
            x = images(1, options.size, options.seed + 3).to(self._device)
            expected = reference(model, x)
            for dtype in options.dtypes:
                entry = Entry(model, x, dtype)
                self._keep(measure_phases(name, graph, entry, expected, options.seconds, say))
                free(self._device)
        if options.stream:
            self._stream(model, say)

    def _accuracy(self, model: ResNet, engines: Iterable[Engine], say: Say) -> list[Record]:
        options = self._options
        say(f"{self._workload.name}: float64 on the CPU")
        count = _ACCURACY_IMAGES[self._device.type]
        judged = Accuracy(self._workload.name, model, count, options.size, options.seed + 4)
        return [judged.check(engine) for engine in engines]

    def _stream(self, model: ResNet, say: Say) -> None:
        options = self._options
        example = images(1, options.size).to(self._device)
        for dtype in options.dtypes:
            engine = compile(
                model, example, dtype=dtype, device=self._device, normalize=(MEAN, DEVIATION), plans=1
            )
            for batch in STREAM_BATCHES:
                self._keep(
                    measure_stream(
                        self._workload.name, engine, batch, options.size, options.seconds, options.seed, say
                    )
                )
                free(self._device)

    def _keep(self, records: Sequence[Record]) -> None:
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
                self._console.print(f"[red]failed:[/] {escape(tables.failure(record))}")
        if self._ceilings and self._options.results:
            found = [record.stamped(self._origin) for record in card.records(self._ceilings)]
            store.file_away(self._options.results, found)
        if self._options.plot:
            from escalade.report.network_plot import network_plot

            written = network_plot(self.records, self._workload.name, self._options.plot)
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
        options.json.write_text(explanation.to_json() + "\n")
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
