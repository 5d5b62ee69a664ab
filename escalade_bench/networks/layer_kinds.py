"""Time of one image by kind of layer: PyTorch's operators on a CPU, and one kernel per layer on a GPU."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from escalade.engine.engine import Engine
from escalade.engine.passes.fusion_level import FusionLevel
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.engine.step_times import time_plan, time_steps
from escalade_bench.ladder import free
from escalade_bench.measure.records import Record
from escalade_bench.networks.cpu import CPU
from escalade_bench.networks.phases import one_thread
from escalade_bench.networks.workload import Say, Setting

PART, SUFFIX = "layer-kinds", "_layer_kinds"
"""The part of a run, and the suffix of its records' workload."""
KINDS: Mapping[str, tuple[str, ...]] = {
    "Conv2D": ("convolution", "conv2d"),
    "BatchNorm": ("native_batch_norm", "batch_norm"),
    "ReLU": ("relu",),
    "MaxPool": ("max_pool2d_with_indices", "max_pool2d"),
    "AdaptiveAvgPool": ("mean", "_adaptive_avg_pool2d", "adaptive_avg_pool2d"),
    "Linear": ("addmm", "linear"),
    "addition": ("add",),
}
"""Names of PyTorch's operators and Escalade's operations, by kind."""
OTHERS, TOTAL = "others", "total"
_PASSES = 5
_OF = {name: kind for kind, names in KINDS.items() for name in names}


def measure(setting: Setting, say: Say) -> Iterator[list[Record]]:
    """Return a record per kind on either side, and one for the whole."""
    x = setting.inputs(1, 7)
    say(f"{setting.name}: its layers on the CPU")
    cpu = on_cpu(setting.model, x.cpu())
    for dtype in setting.of_part(PART):
        say(f"{setting.name}: its layers in {dtype} on the GPU")
        blank = Record(setting.name + SUFFIX, f"{setting.size}_b1", dtype, "nhwc", 1, "escalade", "")
        ours = [
            replace(blank, rung=kind, timing="graph", median_us=us)
            for kind, us in _on_gpu(setting, x, dtype).items()
        ]
        theirs = [
            replace(blank, system=CPU, rung=kind, timing="cpu", wall_us=us, note="one thread, fp32")
            for kind, us in cpu.items()
        ]
        yield [*ours, *theirs]
        free(setting.device)


class _Timed(TorchDispatchMode):
    """Sums the time of PyTorch's operators by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = defaultdict(float)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        began = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        self.seconds[_OF.get(func.overloadpacket.__name__, OTHERS)] += time.perf_counter() - began
        return result


def on_cpu(model: nn.Module, x: torch.Tensor) -> dict[str, float]:
    """Return microseconds per kind on one thread, and of the whole without instrumentation: medians of passes."""
    passes: dict[str, list[float]] = defaultdict(list)
    with one_thread(), torch.no_grad():
        model(x)
        for _ in range(_PASSES):
            began = time.perf_counter()
            model(x)
            passes[TOTAL].append(time.perf_counter() - began)
            with _Timed() as watched:
                model(x)
            for kind, seconds in watched.seconds.items():
                passes[kind].append(seconds)
    found = {kind: 1e6 * statistics.median(times) for kind, times in passes.items()}
    return {kind: found[kind] for kind in (*KINDS, OTHERS, TOTAL) if kind in found}


def _on_gpu(setting: Setting, x: torch.Tensor, dtype: str) -> dict[str, float]:
    """Return microseconds per kind, one kernel per layer, and of all of them as one CUDA graph."""
    engine = Engine(setting.graph, dtype, setting.device, plans=1, fusion=FusionLevel.separate)
    program = engine.program(x)
    assert isinstance(program, KernelProgram)
    found: dict[str, float] = dict.fromkeys((*KINDS, OTHERS), 0.0)
    for each in time_steps(program, (x,), setting.device):
        found[_OF.get(each.step.node.op, OTHERS)] += each.plan_us
    return {kind: us for kind, us in found.items() if us} | {TOTAL: time_plan(program, (x,))}
