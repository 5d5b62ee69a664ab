"""One image through a network, climbing: loops on a CPU, PyTorch there, the copies alone, convolutions on the GPU, then
everything: naive kernels, better kernels, one graph, fusion.

Times are those of a user who has an image in (pinned) host memory and wants the logits there.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial

import torch

from escalade.bench.networks import turns
from escalade.bench.networks.judging import Standard, spoil
from escalade.bench.networks.loops import OPTIONS, convolutions_on, in_loops
from escalade.bench.networks.workload import Say
from escalade.bench.peers.network import Task, waiting
from escalade.device.timing import CallSampler, EventSampler, ReplaySampler, Sampler, Timing
from escalade.engine.engine import Engine
from escalade.engine.graph.forms import STORAGE
from escalade.engine.graph.graph import Graph
from escalade.engine.passes.fusion_level import FusionLevel
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.errors import EscaladeError
from escalade.measure.records import Record
from escalade.ops.base.switches import precision

SUMMARIES = {
    "loops": f"plain C loops on one thread, fp32, by g++ {' '.join(OPTIONS)}: no vectors, no blocking",
    "cpu": "PyTorch's CPU operators on one thread, fp32: better than plain loops",
    "transfer": "the image to the GPU and logits back, nothing computed",
    "convolutions": "convolutions and BatchNorm by kernels, each copied to the GPU and back; the rest on one thread",
    "naive": "every operation a kernel of its own, by the foot of its ladder, launched one by one",
    "separate": "every operation a kernel of its own, by the rung chosen for it, launched one by one",
    "graph": "the same kernels as one CUDA graph",
    "optimised": "fused, one CUDA graph: the engine",
}


_IN_FP32 = ("loops", "cpu")


@dataclass(frozen=True)
class Phase:
    name: str
    call: Callable[[], torch.Tensor]
    """A call from host memory to host memory."""
    on_device: Sampler | None
    """A sampler of what a call does on the device."""
    peak_bytes: int | None
    memory: Sequence[torch.Tensor] = ()
    """What is written: spoilt before it is checked."""
    outputs: Sequence[torch.Tensor] = ()
    """The tensors where `on_device` leaves results."""
    copied: Callable[[], bool] | None = None
    """Whether everything has arrived, for a phase that computes nothing."""
    once: bool = False
    """Whether it takes so long that the call that is judged is the one that is timed."""


def measure_phases(
    workload: str,
    graph: Graph,
    task: Task,
    standards: Mapping[str, Standard],
    seconds: float,
    say: Say,
) -> list[Record]:
    """A record of each phase on one image, in their order; `gain` is over the phase before.

    Of the standards one is for the task's dtype and one, the CPU's, for fp32.
    """
    size = task.x.shape[-1]
    blank = Record(f"{workload}_phases", f"{size}_b1", task.dtype, "nhwc", 1, "escalade", "")
    say(f"{workload} phases {task.dtype}: verifying")
    records: dict[str, Record] = {}
    right: list[Phase] = []
    with precision(task.dtype), torch.no_grad():
        for name, make in _phases(graph, task, standards[task.dtype]).items():
            record = replace(blank, rung=name, note=SUMMARIES[name])
            try:
                phase = make()
                standard = standards["fp32" if name in _IN_FP32 else task.dtype]
                began = time.perf_counter()
                record = replace(checked(record, phase, standard), peak_bytes=phase.peak_bytes)
                if phase.once and not record.failure:
                    record = by_the_clock(record, time.perf_counter() - began)
            except (RuntimeError, EscaladeError) as broken:
                record = replace(record, failure=f"{type(broken).__name__}: {broken}")
            records[name] = record
            if not record.failure and not phase.once:
                right.append(phase)
        say(f"{workload} phases {task.dtype}: timing")
        for name, (device, wall) in _time(right, task.device, seconds).items():
            records[name] = timed(records[name], device, wall)
        for phase in right:
            standard = standards["fp32" if phase.name in _IN_FP32 else task.dtype]
            again = checked(records[phase.name], phase, standard)
            if again.failure:
                failure = f"after it was timed {again.failure}"
                records[phase.name] = replace(
                    blank, rung=phase.name, note=SUMMARIES[phase.name], failure=failure
                )
    return with_gains(list(records.values()))


def by_the_clock(record: Record, seconds: float) -> Record:
    """The record with the time of its one call on a CPU."""
    return replace(
        record, timing="cpu", samples=1, wall_us=1e6 * seconds, images_per_s=record.batch / seconds
    )


def timed(record: Record, device: Timing | None, wall: Timing) -> Record:
    """The record with its times; of a CPU there is the wall clock alone."""
    return replace(
        record,
        timing="cpu" if device is None else device.how,
        samples=wall.samples if device is None else device.samples,
        median_us=None if device is None else device.median_us,
        p20_us=None if device is None else device.p20_us,
        p80_us=None if device is None else device.p80_us,
        conditions=(device or wall).seen,
        wall_us=wall.median_us,
        images_per_s=1e6 * record.batch / wall.median_us,
    )


def checked(record: Record, phase: Phase, standard: Standard) -> Record:
    """A call, and what is timed on the device: each over spoilt memory."""
    spoil(phase.memory)
    result = phase.call()
    if phase.copied is not None:
        return replace(record, failure="" if phase.copied() else "what was copied did not arrive")
    error, failure = standard.judge((result,))
    if not failure and phase.on_device is not None:
        spoil(phase.memory)
        phase.on_device.start()
        phase.on_device.finish()
        error, failure = standard.judge(phase.outputs)
        failure = failure and f"its graph: {failure}"
    return replace(
        record, error=None if math.isnan(error) else error, tolerance=standard.tolerance, failure=failure
    )


def _phases(graph: Graph, task: Task, standard: Standard) -> dict[str, Callable[[], Phase]]:
    """How to make each of them, in their order: the kernels of one may fail, and the others go on."""
    device, (expected,) = task.device, standard.expected
    image = task.x.cpu().pin_memory()
    x = torch.empty_like(image, device=device)
    room = expected.to(STORAGE[task.dtype])
    logits = torch.empty(expected.shape, dtype=STORAGE[task.dtype], pin_memory=True)

    def loops() -> Phase:
        mode = in_loops()  # compiled here, and not on the account of the call

        def call() -> torch.Tensor:
            with mode:
                return task.model(image)

        return Phase("loops", call, None, None, once=True)

    def convolutions() -> Phase:
        mode = convolutions_on(device, STORAGE[task.dtype])

        def call() -> torch.Tensor:
            with one_thread(), mode:
                return task.model(image)

        return Phase("convolutions", call, None, None)

    def cpu() -> Phase:
        def call() -> torch.Tensor:
            with one_thread():
                return task.model(image)

        return Phase("cpu", call, None, None)

    def transfer() -> Phase:
        def call() -> torch.Tensor:
            x.copy_(image, non_blocking=True)
            return logits.copy_(room, non_blocking=True)

        def copied() -> bool:
            torch.cuda.synchronize(device)
            return torch.equal(x.cpu(), image) and torch.equal(logits, room.cpu())

        sampler = EventSampler(call, 1, "eager")
        return Phase("transfer", call, sampler, x.nbytes + room.nbytes, (x, logits), copied=copied)

    @cache
    def program(fusion: FusionLevel) -> KernelProgram:
        made = Engine(graph, task.dtype, device, plans=1, fusion=fusion).program(x)
        assert isinstance(made, KernelProgram)
        return made

    def kernels(name: str, fusion: FusionLevel, one_by_one: bool) -> Phase:
        return host_to_host(name, program(fusion), image, one_by_one)

    return {
        "loops": loops,
        "cpu": cpu,
        "transfer": transfer,
        "convolutions": convolutions,
        "naive": partial(kernels, "naive", FusionLevel.naive, True),
        "separate": partial(kernels, "separate", FusionLevel.separate, True),
        "graph": partial(kernels, "graph", FusionLevel.separate, False),
        "optimised": partial(kernels, "optimised", FusionLevel.fused, False),
    }


def host_to_host(name: str, ready: KernelProgram, images: torch.Tensor, one_by_one: bool = False) -> Phase:
    """A plan over images in pinned memory, whose results end there too."""
    run = ready.run_steps if one_by_one else ready.run
    results = torch.empty(ready.outputs[0].shape, dtype=ready.outputs[0].dtype, pin_memory=True)

    def fill() -> None:
        ready.inputs[0].copy_(images, non_blocking=True)

    def call() -> torch.Tensor:
        fill()
        run()
        results.copy_(ready.outputs[0], non_blocking=True)
        torch.cuda.synchronize(ready.outputs[0].device)
        return results

    memory = (*ready.inputs, *ready.outputs, results)
    return Phase(name, call, ReplaySampler(fill, ready.run), ready.plan.bytes, memory, ready.outputs)


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _time(
    phases: Sequence[Phase], device: torch.device, seconds: float
) -> dict[str, tuple[Timing | None, Timing]]:
    """Times on the device, and by the wall clock."""
    samplers = {phase.name: phase.on_device for phase in phases if phase.on_device}
    on_device = turns.on_device(samplers, seconds)
    wait = waiting(device)
    clocks: dict[str, Sampler] = {phase.name: CallSampler(phase.call, wait) for phase in phases}
    by_clock = turns.by_clock(clocks, seconds)
    return {phase.name: (on_device.get(phase.name), by_clock[phase.name]) for phase in phases}


def with_gains(records: Sequence[Record]) -> list[Record]:
    """The records with gains over the phase before, by the wall clock; the copies alone are nothing to compare with."""
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
