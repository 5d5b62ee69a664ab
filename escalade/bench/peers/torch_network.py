"""PyTorch at its best: eager, folded and CUDA-graphed, compiled and frozen; in the layouts that it is told to try."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.optimization import fuse
from torch.utils._pytree import tree_map_only

from escalade.bench.peers.network import (
    FORMATS,
    NetworkPeer,
    Peak,
    Replay,
    Task,
    Unavailable,
    tensors,
    waiting,
)
from escalade.device.recording import recorded
from escalade.engine.graph.forms import STORAGE
from escalade.measure.refusal import reason

_WARM_UP = 3
Run = Callable[[torch.Tensor], Any]


def eager(task: Task, layouts: Sequence[str]) -> list[NetworkPeer]:
    """The model as it is."""
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
    """BatchNorm folded, one CUDA graph; in Escalade's own layout if none is named."""
    return [graphed("torch-graph", task, layout, lambda model: model) for layout in layouts or (task.layout,)]


MAX_AUTOTUNE, DEFAULT = "max-autotune", "default"
"""Modes of `torch.compile`: with every choice measured, and as it is without being told."""
WITHOUT_GRAPHS = {MAX_AUTOTUNE: "max-autotune-no-cudagraphs", DEFAULT: DEFAULT}
"""Modes with the same kernels and without CUDA graphs of their own, to be captured by hand."""


def compiled(
    task: Task, layouts: Sequence[str] = (), mode: str = MAX_AUTOTUNE, own_graphs: bool = False
) -> list[NetworkPeer]:
    """`torch.compile` with the weights frozen in, one CUDA graph.

    The graph is captured here and not by `mode="max-autotune"`, so that its replay can be timed as the others' are;
    the kernels are the same. With `own_graphs` it is compiled in that mode too, and that is what a call is.
    """
    system = compile_system(mode)
    require_cuda(system, task.device)
    import torch._inductor.config as inductor

    torch._dynamo.reset()
    with inductor.patch(freezing=True), torch.no_grad():  # compiled by the first call
        return [_compiled(system, task, layout, mode, own_graphs) for layout in layouts or (task.layout,)]


def compile_system(mode: str) -> str:
    """Each mode is a system of its own in the records; without a name it is max-autotune."""
    return "torch-compile" if mode == MAX_AUTOTUNE else f"torch-compile-{mode}"


def _compiled(system: str, task: Task, layout: str, mode: str, own_graphs: bool) -> NetworkPeer:
    def make(model: nn.Module, mode: str) -> Run:
        return torch.compile(model, mode=mode, dynamic=False)

    alone = graphed(system, task, layout, partial(make, mode=WITHOUT_GRAPHS[mode]))
    alone = replace(alone, config={"mode": WITHOUT_GRAPHS[mode], "freezing": True})
    if not own_graphs:
        return alone
    run, x = make(folded(task, layout)[0], MAX_AUTOTUNE), task.input(layout)
    repeat(lambda: run(x))
    note = "; ".join(filter(None, (alone.note, "a call is max-autotune's, with CUDA graphs of its own")))
    return replace(alone, call=lambda: run(x), note=note)


def graphed(system: str, task: Task, layout: str, make: Callable[[nn.Module], Run]) -> NetworkPeer:
    """What is made of the folded model, as one CUDA graph."""
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
    """A function of one tensor as one CUDA graph."""

    def __init__(self, run: Run, x: torch.Tensor, peak: Peak) -> None:
        self._run = run  # a graph knows the addresses of its weights, but does not keep them
        self.x = x.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            repeat(lambda: run(self.x))
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()

        def capture() -> (
            Any
        ):  # on the stream of the calls before: some keep the one that they were first given
            with torch.no_grad(), recorded(self._graph, side):
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
    """The model with its norms folded, in float64 first, so that folding adds no rounding of its own; and a note if
    PyTorch cannot fold them.
    """
    model, note = copy.deepcopy(task.model), ""
    norms = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    if any(isinstance(layer, norms) for layer in model.modules()):
        try:
            model = fuse(model.double())
        except Exception as broken:  # torch.fx may fail in any way on code that it cannot trace
            note = f"BatchNorm is not folded: {reason(broken)}"
    return _placed(model, task, layout), note


def _placed(model: nn.Module, task: Task, layout: str) -> nn.Module:
    placed = model.to(task.x.device, STORAGE[task.dtype])
    return placed.to(memory_format=FORMATS[layout])  # type: ignore[call-overload]


def require_cuda(system: str, device: torch.device) -> None:
    if device.type != "cuda":
        raise Unavailable(f"{system} needs a GPU")


def repeat(call: Callable[[], object]) -> None:
    """Lets cuDNN choose, and the allocator settle."""
    for _ in range(_WARM_UP):
        call()
