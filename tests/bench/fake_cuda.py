"""A fake GPU, to test measurements without one: clocks, events, graphs, streams and memory.

Enqueued work starts when the GPU has finished the work before it and the CPU has enqueued it. A graph records
PyTorch's operators and the fake kernels (`Card.kernel`) of its capture; as on a GPU, nothing runs before the first
replay, and results are NaN until then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LAUNCH_US = 5.0
"""CPU time to enqueue anything."""
CYCLES_PER_US = 2000.0


class Card:
    """Both clocks in microseconds, and the work done."""

    def __init__(self) -> None:
        self.cpu = self.gpu = 0.0
        self.log: list[str] = []
        self.recording: Graph | None = None
        self.allocated = self.peak = 0

    def kernel(self, us: float, work: Callable[[], object] = lambda: None) -> None:
        """Take `us` on the GPU, and do the work."""
        if self.recording is not None:
            self.recording.steps.append((us, work))
            return
        self.enqueue(us)
        work()

    def enqueue(self, us: float) -> None:
        self.cpu += LAUNCH_US
        self.gpu = max(self.gpu, self.cpu) + us

    def sleep(self, cycles: int) -> None:
        self.log.append("sleep")
        self.enqueue(cycles / CYCLES_PER_US)

    def synchronize(self, device: object = None) -> None:
        self.cpu = max(self.cpu, self.gpu)

    def use(self, size: int) -> None:
        """Allocate these bytes, or free them if negative."""
        self.allocated += size
        self.peak = max(self.peak, self.allocated)

    def reset_peak(self, device: object = None) -> None:
        self.peak = self.allocated

    @contextmanager
    def capture(self, graph: Graph, **options: Any) -> Iterator[None]:
        assert self.recording is None
        self.recording = graph
        try:
            with _Recorder(graph):
                yield
        finally:
            self.recording = None
        for fresh in graph.fresh:
            fresh.fill_(math.nan)


class Graph:
    def __init__(self, card: Card) -> None:
        self.steps: list[tuple[float, Callable[[], object]]] = []
        self.fresh: list[torch.Tensor] = []
        self._card = card

    def replay(self) -> None:
        self._card.log.append("replay")
        self._card.enqueue(sum(us for us, _ in self.steps))
        for _, work in self.steps:
            work()


class _Recorder(TorchDispatchMode):
    """Record every operator, to run it again in the same memory. Each takes a microsecond."""

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self._graph = graph

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = {_place(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        fresh = [
            leaf
            for leaf in tree_leaves(result)
            if isinstance(leaf, torch.Tensor) and _place(leaf) not in given
        ]

        def again() -> None:
            with torch.no_grad():
                once_more = [
                    leaf for leaf in tree_leaves(func(*args, **kwargs)) if isinstance(leaf, torch.Tensor)
                ]
                kept = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
                for old, new in zip(kept, once_more, strict=True):
                    if _place(old) not in given:
                        old.copy_(new)

        self._graph.steps.append((1.0, again))
        self._graph.fresh += [tensor for tensor in fresh if tensor.is_floating_point()]
        return result


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Event:
    def __init__(self, card: Card) -> None:
        self._card = card
        self.at = math.nan

    def record(self, stream: object = None) -> None:
        self.at = max(self._card.gpu, self._card.cpu)

    def synchronize(self) -> None:
        self._card.cpu = max(self._card.cpu, self.at)

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds, as in PyTorch."""
        return (end.at - self.at) / 1e3


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Card:
    """Replacement for `torch.cuda`. Tensors stay on the CPU."""
    made = Card()
    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=made.synchronize, cuda_stream=0)
    for name, value in {
        "Event": lambda enable_timing=False: _Event(made),
        "CUDAGraph": lambda: Graph(made),
        "graph": made.capture,
        "synchronize": made.synchronize,
        "_sleep": made.sleep,
        "Stream": lambda device=None: stream,
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device=None: stream,
        "device": lambda device: nullcontext(),
        "memory_allocated": lambda device=None: made.allocated,
        "max_memory_allocated": lambda device=None: made.peak,
        "reset_peak_memory_stats": made.reset_peak,
        "empty_cache": lambda: None,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return made
