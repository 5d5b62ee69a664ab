"""PyTorch at its best: eager in channels_last, folded and CUDA-graphed in both layouts, compiled and frozen."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.fx.experimental.optimization import fuse

from escalade.bench.networks.contender import Contender, Entry, Peak, Unavailable, waiting
from escalade.engine.forms import STORAGE

_WARM_UP = 3
_FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
Run = Callable[[torch.Tensor], torch.Tensor]


def eager(entry: Entry) -> list[Contender]:
    """The model as it is, in channels_last."""
    peak = Peak(entry.device)
    model = _placed(copy.deepcopy(entry.model), entry, "nhwc")
    x = _input(entry, "nhwc")

    def call() -> torch.Tensor:
        with torch.inference_mode():
            return model(x)

    _repeat(call)
    _, peak_bytes = peak.of(call)
    return [Contender("torch-eager", "nhwc", call, _same, waiting(entry.device), peak_bytes=peak_bytes)]


def graph(entry: Entry) -> list[Contender]:
    """BatchNorm folded, one CUDA graph; both layouts, of which the faster counts."""
    return [_graphed("torch-graph", entry, layout, partial(_folded, entry, layout)) for layout in _FORMATS]


def compiled(entry: Entry) -> list[Contender]:
    """`torch.compile` with every choice measured and the weights frozen in, one CUDA graph.

    The graph is captured here and not by `mode="max-autotune"`, so that its replay can be timed as the others' are;
    the kernels are the same.
    """
    _require_cuda("torch-compile", entry.device)
    import torch._inductor.config as inductor

    def make() -> Run:
        torch._dynamo.reset()
        return torch.compile(_folded(entry, "nhwc"), mode="max-autotune-no-cudagraphs", dynamic=False)

    with inductor.patch(freezing=True):  # compiled by the first call
        return [_graphed("torch-compile", entry, "nhwc", make)]


def _graphed(system: str, entry: Entry, layout: str, make: Callable[[], Run]) -> Contender:
    _require_cuda(system, entry.device)
    peak = Peak(entry.device)
    x = _input(entry, layout)
    graphed = Graphed(make(), x, peak)
    return Contender(
        system, layout, lambda: graphed(x), _same, waiting(entry.device),
        prepare=lambda: graphed.fill(x), replay=graphed.replay, peak_bytes=graphed.peak_bytes,
    )  # fmt: skip


class Graphed:
    """A function of one tensor as one CUDA graph."""

    def __init__(self, run: Run, x: torch.Tensor, peak: Peak) -> None:
        self._run = run  # a graph knows the addresses of its weights, but does not keep them
        self._x = x.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            _repeat(lambda: run(self._x))
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()

        def capture() -> torch.Tensor:
            with torch.no_grad(), torch.cuda.graph(self._graph):
                return run(self._x)

        self._y, self.peak_bytes = peak.of(capture)

    def fill(self, x: torch.Tensor) -> None:
        self._x.copy_(x)

    def replay(self) -> None:
        self._graph.replay()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.fill(x)
        self.replay()
        return self._y.clone()


def _folded(entry: Entry, layout: str) -> nn.Module:
    """In float64 first, so that folding adds no rounding of its own."""
    return _placed(fuse(copy.deepcopy(entry.model).double()), entry, layout)


def _placed(model: nn.Module, entry: Entry, layout: str) -> nn.Module:
    placed = model.to(entry.device, STORAGE[entry.dtype])
    return placed.to(memory_format=_FORMATS[layout])  # type: ignore[call-overload]


def _input(entry: Entry, layout: str) -> torch.Tensor:
    return entry.x.to(STORAGE[entry.dtype], memory_format=_FORMATS[layout], copy=True)


def _require_cuda(system: str, device: torch.device) -> None:
    if device.type != "cuda":
        raise Unavailable(f"{system} needs a GPU")


def _repeat(call: Callable[[], object]) -> None:
    """Lets cuDNN choose, and the allocator settle."""
    for _ in range(_WARM_UP):
        call()


def _same(result: torch.Tensor) -> torch.Tensor:
    return result
