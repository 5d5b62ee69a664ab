"""A network on the CPU and on the GPU, batch by batch: the same images, from host memory to results there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from escalade.engine.plan.kernel_program import KernelProgram
from escalade_bench.ladder import free
from escalade_bench.measure.records import Record
from escalade_bench.networks.judging import Standard
from escalade_bench.networks.measurement import Case, compare
from escalade_bench.networks.phases import host_to_host, timed_on_cpu
from escalade_bench.networks.workload import Say, Setting
from escalade_bench.peers.network import NetworkPeer, Task

PART, SUFFIX = "cpu", "_cpu"
"""The part of a run, and the suffix of its records' workload."""
CPU = "torch-cpu"
BATCHES = (1, 4, 8, 16, 32, 64, 128, 256, 512)
DTYPES = ("fp32", "fp16")
_MOST_ROUNDS, _FEW_IMAGES = 20, 64
"""Rounds on the CPU at most; above this number of images, one round."""


def measure(setting: Setting, say: Say) -> Iterator[list[Record]]:
    """Measure PyTorch's operators on all cores in fp32, and the engine in each dtype."""
    batches = BATCHES if setting.batches == setting.workload.batches else setting.batches
    dtypes = setting.of_part(PART)
    for batch in batches:
        say(f"{setting.name} batch {batch}: on the CPU")
        x, standards = setting.known(setting.model, batch, 6, (*dtypes, "fp32"))
        images = x.cpu()
        on_cpu = _on_cpu(setting, images, standards["fp32"])
        for dtype in dtypes:
            task = Task(setting.model, x, dtype)
            case = Case(setting.name + SUFFIX, task, standards[dtype], setting.seconds, by_call=True)

            def made(task: Task, images: torch.Tensor = images) -> list[NetworkPeer]:
                program = setting.engine(task.dtype).program(images.to(setting.device))
                assert isinstance(program, KernelProgram)
                return [host_to_host("escalade", program, images.pin_memory())]

            yield [*compare(case, {"escalade": made}, say), replace(on_cpu, dtype=dtype)]
            free(setting.device)


def _on_cpu(setting: Setting, images: torch.Tensor, standard: Standard) -> Record:
    batch, laid = len(images), images.contiguous(memory_format=torch.channels_last)
    blank = Record(
        setting.name + SUFFIX, f"{setting.size}_b{batch}", "fp32", "nhwc", batch, CPU, "",
        note=f"PyTorch's operators in fp32 on {torch.get_num_threads()} threads, channels_last",
    )  # fmt: skip
    with torch.no_grad():
        setting.model(laid)  # the first call allocates
    rounds = _MOST_ROUNDS if batch <= _FEW_IMAGES else 1
    return timed_on_cpu(blank, lambda: setting.model(laid), standard, setting.seconds, rounds)
