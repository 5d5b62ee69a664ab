"""Networks by PyTorch: eager, folded and CUDA-graphed, or compiled with frozen weights, in the layouts to try."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.optimization import fuse
from torch.utils._pytree import tree_map_only

from escalade.device.recording import capture_into
from escalade.device.timing import begin_turn, on_gpu, takes_turns
from escalade.engine.graph.forms import STORAGE
from escalade.tune.refusal import failure_reason
from escalade_bench.peers.network import (
    FORMATS,
    NetworkPeer,
    Peak,
    Replay,
    Task,
    Unavailable,
    tensors,
    waiting,
)  # fmt: skip

COMPILE, COMPILE_DEFAULT = "torch-compile", "torch-compile-default"
MODES = {COMPILE: "max-autotune-no-cudagraphs", COMPILE_DEFAULT: "default"}
"""Mode of `torch.compile` per system, without CUDA graphs of its own: the graph is captured here."""
_WARM_UP = 3
_COMPILER_THREADS = "TORCHINDUCTOR_COMPILE_THREADS"
Run = Callable[[torch.Tensor], Any]


def eager(task: Task, layouts: Sequence[str]) -> list[NetworkPeer]:
    """Make the unchanged model."""
    with on_gpu():  # cuDNN chooses by timing
        return [_eager(task, layout) for layout in layouts]


def _eager(task: Task, layout: str) -> NetworkPeer:
    peak = Peak(task.device)
    model = _placed(copy.deepcopy(task.model), task, layout)
    x = task.input(layout)

    def call() -> torch.Tensor:
        with torch.inference_mode():
            return model(x)

    repeat(call)
    _, peak_bytes = peak.of(call)
    return NetworkPeer("torch-eager", layout, call, tensors, waiting(task.device), peak_bytes=peak_bytes)


def graph(task: Task, layouts: Sequence[str] = ()) -> list[NetworkPeer]:
    """Make one CUDA graph with BatchNorm folded; in the layout of Escalade's inputs if none is given."""
    with on_gpu():
        return [
            _graphed("torch-graph", task, layout, lambda model: model) for layout in layouts or (task.layout,)
        ]


def compiled(
    task: Task, layouts: Sequence[str] = (), system: str = COMPILE, own_graphs: bool = False
) -> list[NetworkPeer]:
    """Make `torch.compile` with frozen weights, captured into one CUDA graph.

    `mode="max-autotune"` would capture the same kernels, but its replay could not be timed alone. With `own_graphs` a
    call runs the model compiled in that mode.
    """
    require_cuda(system, task.device)
    import torch._inductor.config as inductor

    torch._dynamo.reset()
    with inductor.patch(freezing=True), torch.no_grad():  # compiled by the first call
        return [_compiled(system, task, layout, own_graphs) for layout in layouts or (task.layout,)]


def compile_model(model: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Compile a model or function for fixed sizes.

    If processes take turns on the GPU, compilation overlaps with the others. The first call, which times kernels to
    choose among them, waits for a turn.
    """
    if not takes_turns():
        return torch.compile(model, mode=mode, dynamic=False)
    inductor = torch._TorchCompileInductorWrapper(mode, None, False)

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        made = inductor(graph, inputs)

        def run(*arguments: Any) -> Any:
            begin_turn()
            return made(*arguments)

        return run

    return torch.compile(model, backend=backend, dynamic=False)


@contextlib.contextmanager
def compiler_threads(count: int) -> Iterator[None]:
    """Set the number of Inductor's compilers."""
    import torch._inductor.config as inductor

    before = os.environ.get(_COMPILER_THREADS)
    os.environ[_COMPILER_THREADS] = str(count)
    try:
        with inductor.patch(compile_threads=count):
            yield
    finally:
        if before is None:
            del os.environ[_COMPILER_THREADS]
        else:
            os.environ[_COMPILER_THREADS] = before


@contextlib.contextmanager
def _benchmarking_in_turns() -> Iterator[None]:
    """Let Inductor's kernel search wait for a turn on the GPU; its compilation does not."""
    if not takes_turns():
        yield
        return
    from torch._inductor.runtime.benchmarking import benchmarker

    plain = benchmarker.benchmark

    def benchmark(*arguments: Any, **options: Any) -> Any:
        with on_gpu():
            return plain(*arguments, **options)

    benchmarker.benchmark = benchmark
    try:
        yield
    finally:
        benchmarker.benchmark = plain


def _compiled(system: str, task: Task, layout: str, own_graphs: bool) -> NetworkPeer:
    with on_gpu(lazily=True), _benchmarking_in_turns():
        alone = _graphed(system, task, layout, partial(compile_model, mode=MODES[system]))
    alone = replace(alone, config={"mode": MODES[system], "freezing": True})
    if not own_graphs:
        return alone
    run, x = compile_model(folded(task, layout)[0], "max-autotune"), task.input(layout)
    with on_gpu():
        repeat(lambda: run(x))
    note = "; ".join(filter(None, (alone.note, "a call is max-autotune's, with CUDA graphs of its own")))
    return replace(alone, call=lambda: run(x), note=note)


def _graphed(system: str, task: Task, layout: str, make: Callable[[nn.Module], Run]) -> NetworkPeer:
    require_cuda(system, task.device)
    peak = Peak(task.device)
    x = task.input(layout)
    model, note = folded(task, layout)
    made = Graphed(make(model), x, peak)
    return NetworkPeer(
        system, layout, lambda: made(x), tensors, waiting(task.device),
        Replay(lambda: made.fill(x), made.replay, (made.x,), tensors(made.y)),
        peak_bytes=made.peak_bytes, note=note,
    )  # fmt: skip


class Graphed:
    """A function of one tensor, captured into a CUDA graph."""

    def __init__(self, run: Run, x: torch.Tensor, peak: Peak) -> None:
        self._run = run  # the graph does not keep the weights alive
        self.x = x.clone()
        with torch.no_grad():
            side = warm_up(lambda: run(self.x))
        self._graph = torch.cuda.CUDAGraph()

        def capture() -> Any:
            # Captured on the warm-up stream: some systems keep the stream of their first call.
            with torch.no_grad(), capture_into(self._graph, side):
                return run(self.x)

        self.y, self.peak_bytes = peak.of(capture)

    def fill(self, x: torch.Tensor) -> None:
        self.x.copy_(x)

    def replay(self) -> None:
        self._graph.replay()

    def __call__(self, x: torch.Tensor) -> Any:
        self.fill(x)
        self.replay()
        return tree_map_only(torch.Tensor, torch.Tensor.clone, self.y)


def folded(task: Task, layout: str) -> tuple[nn.Module, str]:
    """Return the model with its norms folded, and a note if PyTorch cannot fold them."""
    model, note = _folded(task.model)
    return _placed(copy.deepcopy(model), task, layout), note


@lru_cache(maxsize=1)  # for all peers and batches of a network
def _folded(model: nn.Module) -> tuple[nn.Module, str]:
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    if not any(isinstance(layer, norms) for layer in model.modules()):
        return model, ""
    try:
        return fuse(copy.deepcopy(model).double()), ""  # float64, so that folding adds no rounding
    except Exception as broken:  # torch.fx may raise anything on code that it cannot trace
        return model, f"BatchNorm is not folded: {failure_reason(broken)}"


def _placed(model: nn.Module, task: Task, layout: str) -> nn.Module:
    placed = model.to(task.x.device, STORAGE[task.dtype])
    return placed.to(memory_format=FORMATS[layout])  # type: ignore[call-overload]


def require_cuda(system: str, device: torch.device) -> None:
    if device.type != "cuda":
        raise Unavailable(f"{system} needs a GPU")


def repeat(call: Callable[[], object]) -> None:
    """Call often enough for cuDNN to choose its kernels and the allocator to reach its final size."""
    for _ in range(_WARM_UP):
        call()


def warm_up(call: Callable[[], object]) -> torch.cuda.Stream:
    """Repeat a call on a side stream, as CUDA graphs require before a capture; return the stream."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        repeat(call)
    torch.cuda.current_stream().wait_stream(side)
    return side
