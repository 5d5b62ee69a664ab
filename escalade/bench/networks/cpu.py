"""A network on the CPU and on the GPU, batch by batch: the same images, from host memory to results there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from escalade.bench.ladder import free
from escalade.bench.networks import turns
from escalade.bench.networks.judging import Standard
from escalade.bench.networks.phases import Phase, checked, host_to_host, timed
from escalade.bench.networks.workload import Say, Setting
from escalade.bench.peers.network import waiting
from escalade.device.timing import CallSampler, Timing, interleave
from escalade.engine.engine import Engine
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.errors import EscaladeError
from escalade.measure.records import Record
from escalade.ops.base.switches import precision

PART, SUFFIX = "cpu", "_cpu"
"""The part of a run, and how the workload of its records ends."""
CPU = "torch-cpu"
BATCHES = (1, 4, 8, 16, 32, 64, 128, 256, 512)
DTYPES = ("fp32", "fp16")
_MOST_ROUNDS, _FEW_IMAGES = 20, 64
"""Rounds at most on the CPU, and images from which on one round does."""


def measure(setting: Setting, say: Say) -> Iterator[list[Record]]:
    """PyTorch's operators on all cores in fp32, and the engine in each dtype; both are judged as networks are."""
    batches = BATCHES if setting.batches == setting.workload.batches else setting.batches
    dtypes = setting.of_part(PART)
    for batch in batches:
        say(f"{setting.name} batch {batch}: on the CPU")
        x, standards = setting.known(setting.model, batch, 6, (*dtypes, "fp32"))
        images = x.cpu()
        on_cpu = _on_cpu(setting, images, standards["fp32"])
        for dtype in dtypes:
            say(f"{setting.name} batch {batch} {dtype}: on the GPU")
            ours = _on_gpu(setting, setting.engine(dtype), images, standards[dtype])
            yield [ours, replace(on_cpu, dtype=dtype)]
            free(setting.device)


def _blank(setting: Setting, batch: int, dtype: str, system: str) -> Record:
    return Record(setting.name + SUFFIX, f"{setting.size}_b{batch}", dtype, "nhwc", batch, system, "")


def _on_cpu(setting: Setting, images: torch.Tensor, standard: Standard) -> Record:
    model = setting.model
    laid = images.contiguous(memory_format=torch.channels_last)

    def call() -> torch.Tensor:
        with torch.no_grad():
            return model(laid)

    note = f"PyTorch's operators in fp32 on {torch.get_num_threads()} threads, channels_last"
    blank = replace(_blank(setting, len(images), "fp32", CPU), note=note)
    record = checked(blank, Phase(PART, call, None, None), standard)
    if record.failure:
        return record
    sampler = CallSampler(call, lambda: None, how="cpu")
    rounds = _MOST_ROUNDS if len(images) <= _FEW_IMAGES else 1
    taken = interleave({CPU: sampler}, seconds_each=setting.seconds, min_rounds=1, max_rounds=rounds)
    return timed(record, None, taken[CPU])


def _on_gpu(setting: Setting, engine: Engine, images: torch.Tensor, standard: Standard) -> Record:
    record = _blank(setting, len(images), engine.dtype, "escalade")
    try:
        with precision(engine.dtype), torch.no_grad():
            program = engine.program(images.to(setting.device))
            assert isinstance(program, KernelProgram)
            phase = host_to_host("gpu", program, images.pin_memory())
            record = replace(checked(record, phase, standard), peak_bytes=phase.peak_bytes)
            if record.failure:
                return record
            return timed(record, *_times(phase, setting))
    except (RuntimeError, EscaladeError) as broken:
        return replace(record, failure=f"{type(broken).__name__}: {broken}")


def _times(phase: Phase, setting: Setting) -> tuple[Timing, Timing]:
    assert phase.on_device is not None
    device = turns.on_device({phase.name: phase.on_device}, setting.seconds)
    calls = {phase.name: CallSampler(phase.call, waiting(setting.device))}
    return device[phase.name], turns.by_clock(calls, setting.seconds)[phase.name]
