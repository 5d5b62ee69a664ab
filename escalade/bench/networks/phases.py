"""One image through a network, climbing: the CPU, the copies alone, then kernels, better kernels, one graph, fusion.

Times are those of a user who has an image in (pinned) host memory and wants the logits there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

from escalade.bench.networks import turns
from escalade.bench.networks.contender import TOLERANCE, Entry, waiting
from escalade.bench.networks.measure import judge
from escalade.bench.networks.workload import Say
from escalade.bench.store import Record
from escalade.bench.timing import CallSampler, EventSampler, ReplaySampler, Sampler
from escalade.engine.engine import Engine
from escalade.engine.forms import STORAGE
from escalade.engine.graph import Graph
from escalade.engine.program import KernelProgram
from escalade.engine.way import Way
from escalade.errors import EscaladeError
from escalade.ops.precision import precision

SUMMARIES = {
    "cpu": "PyTorch's CPU operators on one thread, fp32: better than plain loops",
    "transfer": "the image to the GPU and logits back, nothing computed",
    "naive": "every operation a kernel of its own, by the foot of its ladder, launched one by one",
    "separate": "every operation a kernel of its own, by the rung chosen for it, launched one by one",
    "graph": "the same kernels as one CUDA graph",
    "optimised": "fused, one CUDA graph: the engine",
}


@dataclass(frozen=True)
class Phase:
    name: str
    call: Callable[[], torch.Tensor]
    """From host memory to host memory."""
    on_device: Sampler | None
    peak_bytes: int | None
    computes: bool = True
    """Whether there is a result to check."""


def measure_phases(
    workload: str, graph: Graph, entry: Entry, expected: torch.Tensor, seconds: float, say: Say
) -> list[Record]:
    """A record of each phase on one image, in their order; `gain` is over the phase before."""
    size = entry.x.shape[-1]
    blank = Record(f"{workload}_phases", f"{size}_b1", entry.dtype, "nhwc", 1, "escalade", "")
    say(f"{workload} phases {entry.dtype}: verifying")
    records: dict[str, Record] = {}
    right: list[Phase] = []
    with precision(entry.dtype), torch.no_grad():
        for name, make in _phases(graph, entry, expected).items():
            record = replace(blank, rung=name, note=SUMMARIES[name])
            try:
                phase = make()
                record = replace(_checked(record, phase, expected), peak_bytes=phase.peak_bytes)
            except (RuntimeError, EscaladeError) as broken:
                record = replace(record, failure=f"{type(broken).__name__}: {broken}")
            records[name] = record
            if not record.failure:
                right.append(phase)
        say(f"{workload} phases {entry.dtype}: timing")
        for name, (device, wall) in _time(right, entry.device, seconds).items():
            records[name] = replace(
                records[name], timing="cpu" if device is None else "graph", median_us=device, wall_us=wall,
                images_per_s=1e6 / wall,
            )  # fmt: skip
    return with_gains(list(records.values()))


def _checked(record: Record, phase: Phase, expected: torch.Tensor) -> Record:
    if not phase.computes:
        return record
    dtype = "fp32" if phase.name == "cpu" else record.dtype
    error, failure = judge(phase.call(), expected.cpu(), TOLERANCE[dtype])
    return replace(record, error=error, tolerance=TOLERANCE[dtype], failure=failure)


def _phases(graph: Graph, entry: Entry, expected: torch.Tensor) -> dict[str, Callable[[], Phase]]:
    """How to make each of them, in their order: the kernels of one may fail, and the others go on."""
    device = entry.device
    image = entry.x.cpu().pin_memory()
    x = torch.empty_like(image, device=device)
    room = torch.empty(expected.shape, dtype=STORAGE[entry.dtype], device=device)
    logits = torch.empty(expected.shape, dtype=STORAGE[entry.dtype], pin_memory=True)

    def cpu() -> Phase:
        def call() -> torch.Tensor:
            with _one_thread():
                return entry.model(image)

        return Phase("cpu", call, None, None)

    def transfer() -> Phase:
        def call() -> torch.Tensor:
            x.copy_(image, non_blocking=True)
            return logits.copy_(room, non_blocking=True)

        return Phase("transfer", call, EventSampler(call, 1, "eager"), x.nbytes + room.nbytes, computes=False)

    @cache
    def program(way: Way) -> KernelProgram:
        made = Engine(graph, entry.dtype, device, plans=1, way=way).program(x)
        assert isinstance(made, KernelProgram)
        return made

    def kernels(name: str, way: Way, one_by_one: bool) -> Phase:
        ready = program(way)
        run = ready.run_steps if one_by_one else ready.run

        def fill() -> None:
            ready.inputs[0].copy_(image, non_blocking=True)

        def call() -> torch.Tensor:
            fill()
            run()
            logits.copy_(ready.outputs[0], non_blocking=True)
            torch.cuda.synchronize(device)
            return logits

        return Phase(name, call, ReplaySampler(fill, ready.run), ready.plan.bytes)

    return {
        "cpu": cpu,
        "transfer": transfer,
        "naive": partial(kernels, "naive", Way.naive, True),
        "separate": partial(kernels, "separate", Way.separate, True),
        "graph": partial(kernels, "graph", Way.separate, False),
        "optimised": partial(kernels, "optimised", Way.fused, False),
    }


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _time(
    phases: Sequence[Phase], device: torch.device, seconds: float
) -> dict[str, tuple[float | None, float]]:
    """Microseconds on the device and by the wall clock."""
    samplers = {phase.name: phase.on_device for phase in phases if phase.on_device}
    on_device = turns.on_device(samplers, seconds)
    wait = waiting(device)
    clocks: dict[str, Sampler] = {phase.name: CallSampler(phase.call, wait) for phase in phases}
    by_clock = turns.by_clock(clocks, seconds)
    return {
        phase.name: (
            on_device[phase.name].median_us if phase.name in on_device else None,
            by_clock[phase.name].median_us,
        )
        for phase in phases
    }


def with_gains(records: Sequence[Record]) -> list[Record]:
    """Over the phase before, by the wall clock; the copies alone are nothing to compare with."""
    found: list[Record] = []
    before: Record | None = None
    for record in records:
        comparable = record.wall_us is not None and record.rung != "transfer"
        if comparable and before is not None:
            assert before.wall_us is not None and record.wall_us is not None
            record = replace(record, gain=before.wall_us / record.wall_us, gain_over=before.rung)
        found.append(record)
        before = record if comparable else before
    return found
