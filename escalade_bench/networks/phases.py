"""One image through a network, step by step faster: loops on a CPU, PyTorch there, copies alone, convolutions on the
GPU, then everything there: naive kernels, better kernels, one graph, fusion.

Times are those of a user who has an image in (pinned) host memory and wants the logits there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import cache

import torch

from escalade.device.timing import CallSampler, interleave
from escalade.engine.engine import Engine
from escalade.engine.graph.forms import STORAGE
from escalade.engine.graph.graph import Graph
from escalade.engine.passes.fusion_level import FusionLevel
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.errors import EscaladeError
from escalade_bench.measure.records import Record
from escalade_bench.networks.judging import Standard
from escalade_bench.networks.loops import OPTIONS, convolutions_on, in_loops
from escalade_bench.networks.measurement import Case, compare, with_wall
from escalade_bench.networks.workload import Say
from escalade_bench.peers.network import Maker, NetworkPeer, Replay, Task, tensors, waiting

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
_KERNELS = {
    "naive": (FusionLevel.naive, True),
    "separate": (FusionLevel.separate, True),
    "graph": (FusionLevel.separate, False),
    "optimised": (FusionLevel.fused, False),
}
"""Fusion level per phase, and True to launch its kernels one by one."""
_SLOW_ROUNDS = 5
"""Calls of plain loops: one alone was 4.2 or 7.3 s for the same code."""


def measure_phases(
    workload: str, graph: Graph, task: Task, standards: Mapping[str, Standard], seconds: float, say: Say
) -> list[Record]:
    """Return a record per phase on one image, in order; `gain` is over the phase before.

    `standards` has one for the task's dtype and one for fp32, the CPU's.
    """
    case = Case(f"{workload}_phases", task, standards[task.dtype], seconds, own=True, by_call=True)
    in_fp32 = replace(case, standard=standards["fp32"])
    image = task.x.cpu().pin_memory()
    copies, copy = _copies(task, image, case.standard)
    found = [
        _loops(in_fp32, image),
        *compare(in_fp32, {"cpu": _on_one_thread(image, nullcontext)}, say),
        *(replace(r, error=None, tolerance=None, timing=r.timing and "eager")
          for r in compare(replace(case, standard=copies), {"transfer": copy}, say)),
        *compare(case, _on_gpu(graph, task, image), say),
    ]  # fmt: skip
    noted = {record.rung: replace(record, note=SUMMARIES[record.rung]) for record in found}
    return with_gains([noted[name] for name in SUMMARIES])


def _loops(case: Case, image: torch.Tensor) -> Record:
    """Time calls that take seconds each, and judge the last."""
    blank = replace(case.blank("escalade", "nhwc"), rung="loops")
    try:
        mode = in_loops()  # compiled before the call is timed

        def call() -> torch.Tensor:
            with mode:
                return case.task.model(image)

        return timed_on_cpu(blank, call, case.standard, rounds=_SLOW_ROUNDS, least=_SLOW_ROUNDS)
    except (RuntimeError, EscaladeError) as broken:
        return replace(blank, failure=f"{type(broken).__name__}: {broken}")


def timed_on_cpu(
    record: Record,
    call: Callable[[], torch.Tensor],
    standard: Standard,
    seconds: float = 0.0,
    rounds: int = 1,
    least: int = 1,
) -> Record:
    """Time calls on the CPU, from `least` to `rounds` of them, and judge the last."""
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


def _on_one_thread(image: torch.Tensor, mode: Callable[[], AbstractContextManager[object]]) -> Maker:
    def made(task: Task) -> list[NetworkPeer]:
        entered = mode()

        def call() -> torch.Tensor:
            with one_thread(), entered:
                return task.model(image)

        name = "cpu" if mode is nullcontext else "convolutions"
        return [NetworkPeer(name, "nhwc", call, tensors, waiting(task.device))]

    return made


def _copies(task: Task, image: torch.Tensor, standard: Standard) -> tuple[Standard, Maker]:
    """Return both copies as a system, with what should arrive."""
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


def _on_gpu(graph: Graph, task: Task, image: torch.Tensor) -> dict[str, Maker]:
    """Return the phases whose kernels run on the GPU; each is made when it is its turn, and may fail by itself."""

    @cache
    def program(fusion: FusionLevel) -> KernelProgram:
        made = Engine(graph, task.dtype, task.device, plans=1, fusion=fusion).program(image.to(task.device))
        assert isinstance(made, KernelProgram)
        return made

    def maker(name: str) -> Maker:
        fusion, one_by_one = _KERNELS[name]
        return lambda _: [host_to_host(name, program(fusion), image, one_by_one)]

    convolutions = _on_one_thread(image, lambda: convolutions_on(task.device, STORAGE[task.dtype]))
    return {"convolutions": convolutions, **{name: maker(name) for name in _KERNELS}}


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


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def with_gains(records: Sequence[Record]) -> list[Record]:
    """Return the records with gains over the phase before, by the wall clock; the copies alone are no phase before."""
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
