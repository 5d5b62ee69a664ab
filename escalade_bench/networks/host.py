"""A network from host memory to host memory: one image in phases, batches compared with the CPU, and layers by kind.

Times include the copies from and to (pinned) host memory.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from escalade.device.timing import CallSampler, interleave
from escalade.engine.comparison import time_plan, time_steps
from escalade.engine.engine import Engine
from escalade.engine.graph.forms import STORAGE
from escalade.engine.passes import FusionLevel
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.errors import EscaladeError
from escalade.terminal_text import counted
from escalade_bench.ladder import free
from escalade_bench.measure.records import Record
from escalade_bench.networks.judging import Judge, Standard
from escalade_bench.networks.loops import OPTIONS, convolutions_on, in_loops
from escalade_bench.networks.measurement import Case, compare, with_wall
from escalade_bench.networks.workload import Say, Setting
from escalade_bench.peers.network import Maker, NetworkPeer, Replay, Task, tensors, waiting

PHASES = {
    "loops": f"plain C loops on one thread, fp32, by g++ {' '.join(OPTIONS)}: no vectors, no blocking",
    "cpu": "PyTorch's CPU operators on one thread, fp32: better than plain loops",
    "transfer": "the image to the GPU and logits back, nothing computed",
    "convolutions": "convolutions and BatchNorm by kernels, each copied to the GPU and back; the rest on one thread",
    "naive": "every operation a kernel of its own, by the foot of its ladder, launched one by one",
    "separate": "every operation a kernel of its own, by the rung chosen for it, launched one by one",
    "graph": "the same kernels as one CUDA graph",
    "optimised": "fused, one CUDA graph: the engine",
}
"""Phases of one image in order, with descriptions."""
_KERNELS = {
    "naive": (FusionLevel.naive, True),
    "separate": (FusionLevel.separate, True),
    "graph": (FusionLevel.separate, False),
    "optimised": (FusionLevel.fused, False),
}
"""Fusion level per phase, and True to launch its kernels one by one."""
_SLOW_ROUNDS = 5
"""Calls of plain loops to time: single calls of the same code took 4.2 or 7.3 s."""
CPU = "torch-cpu"
CPU_BATCHES = (1, 4, 8, 16, 32, 64, 128, 256, 512)
DTYPES = ("fp32", "fp16")
"""Dtypes of the parts `cpu` and `layer-kinds`."""
_MOST_ROUNDS, _FEW_IMAGES = 20, 64
"""Maximum number of rounds on the CPU; above this number of images, one round."""
KINDS: Mapping[str, tuple[str, ...]] = {
    "Conv2D": ("convolution", "conv2d"),
    "BatchNorm": ("native_batch_norm", "batch_norm"),
    "ReLU": ("relu",),
    "MaxPool": ("max_pool2d_with_indices", "max_pool2d"),
    "AdaptiveAvgPool": ("mean", "_adaptive_avg_pool2d", "adaptive_avg_pool2d"),
    "Linear": ("addmm", "linear"),
    "addition": ("add",),
}
"""Names of PyTorch's operators and Escalade's operations, by kind of layer."""
OTHERS, TOTAL = "others", "total"
_PASSES = 5
_OF = {name: kind for kind, names in KINDS.items() for name in names}


def phases(setting: Setting, say: Say) -> Iterator[list[Record]]:
    """Measure one image in each phase, in order; `gain` is over the phase before."""
    dtypes = setting.dtypes_with_peers
    x, known = setting.known(setting.model, 1, 3, (*dtypes, "fp32"))
    for dtype in dtypes:
        task, workload = Task(setting.model, x, dtype), f"{setting.name}_phases"
        case = Case(workload, task, known[dtype], setting.session.seconds, own=True, by_call=True)
        in_fp32 = replace(case, standard=known["fp32"])
        image = x.cpu().pin_memory()
        copies, copy = _copies(task, image, case.standard)
        found = [
            _loops(in_fp32, image),
            *compare(in_fp32, {"cpu": _on_one_thread("cpu", image, nullcontext)}, say),
            *(replace(r, error=None, tolerance=None, timing=r.timing and "eager")
              for r in compare(replace(case, standard=copies), {"transfer": copy}, say)),
            *compare(case, _on_gpu(setting, task, image), say),
        ]  # fmt: skip
        noted = {record.rung: replace(record, note=PHASES[record.rung]) for record in found}
        yield with_gains([noted[name] for name in PHASES])
        free(setting.device)


def cpu(setting: Setting, say: Say) -> Iterator[list[Record]]:
    """Measure PyTorch's operators on all cores in fp32, and the engine in each dtype, batch by batch."""
    batches = CPU_BATCHES if setting.batches == setting.workload.batches else setting.batches
    dtypes, workload = setting.of_part("cpu"), f"{setting.name}_cpu"
    for batch in batches:
        say(f"{setting.name} batch {batch}: on the CPU")
        x, standards = setting.known(setting.model, batch, 6, (*dtypes, "fp32"))
        images = x.cpu()
        on_cpu = _on_all_cores(setting, workload, images, standards["fp32"])
        for dtype in dtypes:
            task = Task(setting.model, x, dtype)
            case = Case(workload, task, standards[dtype], setting.session.seconds, by_call=True)

            def made(task: Task, images: torch.Tensor = images) -> list[NetworkPeer]:
                program = _program(setting.engine(task.dtype), images.to(setting.device))
                return [host_to_host("escalade", program, images.pin_memory())]

            yield [*compare(case, {"escalade": made}, say), replace(on_cpu, dtype=dtype)]
            free(setting.device)


def layer_kinds(setting: Setting, say: Say) -> Iterator[list[Record]]:
    """Measure the time of one image by kind of layer: on one CPU thread, and one kernel per layer on the GPU."""
    x = setting.inputs(1, 7)
    say(f"{setting.name}: its layers on the CPU")
    theirs = kinds_on_cpu(setting.model, x.cpu())
    for dtype in setting.of_part("layer-kinds"):
        say(f"{setting.name}: its layers in {dtype} on the GPU")
        blank = Record(f"{setting.name}_layer_kinds", f"{setting.size}_b1", dtype, "nhwc", 1, "escalade", "")
        other = replace(blank, system=CPU, timing="cpu", note="one thread, fp32")
        ours = _kinds_on_gpu(setting, x, dtype)
        yield [
            *(replace(blank, rung=kind, timing="graph", median_us=us) for kind, us in ours.items()),
            *(replace(other, rung=kind, wall_us=us) for kind, us in theirs.items()),
        ]
        free(setting.device)


def _program(engine: Engine, x: torch.Tensor) -> KernelProgram:
    program = engine.program(x)
    assert isinstance(program, KernelProgram)
    return program


def _loops(case: Case, image: torch.Tensor) -> Record:
    """Time calls that take seconds each, and verify the last."""
    blank = replace(case.blank("escalade", "nhwc"), rung="loops")
    try:
        mode = in_loops()  # compiled before the call is timed

        def call() -> torch.Tensor:
            with mode:
                return case.task.model(image)

        return timed_on_cpu(blank, call, case.standard, rounds=_SLOW_ROUNDS, least=_SLOW_ROUNDS)
    except (RuntimeError, EscaladeError) as broken:
        return replace(blank, failure=f"{type(broken).__name__}: {broken}")


def _on_all_cores(setting: Setting, workload: str, images: torch.Tensor, standard: Judge) -> Record:
    batch, laid = len(images), images.contiguous(memory_format=torch.channels_last)
    cores = len(os.sched_getaffinity(0))
    note = f"PyTorch's operators in fp32 on {counted(cores, 'thread')}, channels_last"
    blank = Record(workload, f"{setting.size}_b{batch}", "fp32", "nhwc", batch, CPU, "", note=note)
    rounds = _MOST_ROUNDS if batch <= _FEW_IMAGES else 1
    with on_threads(cores), torch.no_grad():  # processes of a campaign have one
        setting.model(laid)  # the first call allocates
        return timed_on_cpu(blank, lambda: setting.model(laid), standard, setting.session.seconds, rounds)


def timed_on_cpu(
    record: Record,
    call: Callable[[], torch.Tensor],
    standard: Judge,
    seconds: float = 0.0,
    rounds: int = 1,
    least: int = 1,
) -> Record:
    """Time `least` to `rounds` calls on the CPU, and verify the last."""
    results: list[torch.Tensor] = []

    def kept() -> None:
        results[:] = [call()]

    with torch.no_grad():
        sampler = CallSampler(kept, lambda: None, how="cpu")
        (taken,) = interleave(
            {"": sampler}, seconds_each=seconds, min_rounds=least, max_rounds=rounds
        ).values()
    error, failure = standard.judge(results)
    record = replace(record, error=error, tolerance=standard.tolerance, failure=failure)
    return record if failure else with_wall(replace(record, timing="cpu"), taken)


@contextmanager
def on_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _on_one_thread(
    name: str, image: torch.Tensor, mode: Callable[[], AbstractContextManager[object]]
) -> Maker:
    def made(task: Task) -> list[NetworkPeer]:
        entered = mode()

        def call() -> torch.Tensor:
            with on_threads(1), entered:
                return task.model(image)

        return [NetworkPeer(name, "nhwc", call, tensors, waiting(task.device))]

    return made


def _copies(task: Task, image: torch.Tensor, standard: Judge) -> tuple[Judge, Maker]:
    """Return both copies as a system, with the expected results."""
    x = torch.empty_like(image, device=task.device)
    (expected,) = standard.expected
    source = expected.to(STORAGE[task.dtype])
    logits = torch.empty(expected.shape, dtype=source.dtype, pin_memory=True)

    def call() -> Sequence[torch.Tensor]:
        x.copy_(image, non_blocking=True)
        logits.copy_(source, non_blocking=True)
        return x, logits

    replay = Replay(lambda: None, lambda: (call(), None)[1], (), (x, logits))
    wait = waiting(task.device)
    peer = NetworkPeer("transfer", "nhwc", call, tensors, wait, replay, peak_bytes=x.nbytes + source.nbytes)
    return Standard(task.dtype, (image.double(), source.double()), (0.0, 0.0)), lambda _: [peer]


def _on_gpu(setting: Setting, task: Task, image: torch.Tensor) -> dict[str, Maker]:
    """Return the phases whose kernels run on the GPU; each is created on demand, and may fail independently."""

    @cache
    def program(fusion: FusionLevel) -> KernelProgram:
        engine = Engine(setting.graph, task.dtype, task.device, plans=1, fusion=fusion)
        return _program(engine, image.to(task.device))

    def maker(name: str) -> Maker:
        fusion, one_by_one = _KERNELS[name]
        return lambda _: [host_to_host(name, program(fusion), image, one_by_one)]

    name = "convolutions"
    convolutions = _on_one_thread(name, image, lambda: convolutions_on(task.device, STORAGE[task.dtype]))
    return {name: convolutions, **{name: maker(name) for name in _KERNELS}}


def host_to_host(
    name: str, ready: KernelProgram, images: torch.Tensor, one_by_one: bool = False
) -> NetworkPeer:
    """Return a plan over images in pinned memory, with results copied back to pinned memory."""
    run = ready.run_steps if one_by_one else ready.run
    results = torch.empty(ready.outputs[0].shape, dtype=ready.outputs[0].dtype, pin_memory=True)
    wait = waiting(ready.outputs[0].device)

    def fill() -> None:
        ready.inputs[0].copy_(images, non_blocking=True)

    def call() -> torch.Tensor:
        fill()
        run()
        results.copy_(ready.outputs[0], non_blocking=True)
        wait()
        return results

    replay = Replay(fill, ready.run, ready.inputs, ready.outputs)
    return NetworkPeer(name, "nhwc", call, tensors, wait, replay, peak_bytes=ready.plan.bytes)


def with_gains(records: Sequence[Record]) -> list[Record]:
    """Return the records with wall-clock gains over the previous phase; the phase of copies alone is skipped."""
    found: list[Record] = []
    before: Record | None = None
    for record in records:
        if record.wall_us is not None and record.rung != "transfer":
            if before is not None and before.wall_us is not None:
                record = replace(record, gain=before.wall_us / record.wall_us, gain_over=before.rung)
            before = record
        found.append(record)
    return found


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


def kinds_on_cpu(model: nn.Module, x: torch.Tensor) -> dict[str, float]:
    """Return microseconds per kind on one thread, and of the whole without instrumentation: medians of passes."""
    passes: dict[str, list[float]] = defaultdict(list)
    with on_threads(1), torch.no_grad():
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


def _kinds_on_gpu(setting: Setting, x: torch.Tensor, dtype: str) -> dict[str, float]:
    """Return microseconds per kind, one kernel per layer, and of all of them as one CUDA graph."""
    engine = Engine(setting.graph, dtype, setting.device, plans=1, fusion=FusionLevel.separate)
    program = _program(engine, x)
    found: dict[str, float] = dict.fromkeys((*KINDS, OTHERS), 0.0)
    for each in time_steps(program, (x,), setting.device):
        found[_OF.get(each.step.node.op, OTHERS)] += each.plan_us
    return {kind: us for kind, us in found.items() if us} | {TOTAL: time_plan(program, (x,))}
