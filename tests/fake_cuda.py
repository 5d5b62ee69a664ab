"""Streams, events and graphs without a GPU, whose work runs in any order that they allow.

Detects missing waits: work runs only when something waits for it, and `seed` chooses the stream that proceeds,
so that a stream may be far ahead of another or far behind.
"""

from __future__ import annotations

import ctypes
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from escalade.device import streams
from escalade.device.torch_private import FAST_PATHS


class Point:
    """A position in a stream's work."""

    def __init__(self) -> None:
        self.is_reached = False


class Stream:
    def __init__(self, gpu: Gpu, number: int) -> None:
        self.gpu = gpu
        self.cuda_stream = number
        self.work: deque[Callable[[], None] | Point] = deque()

    def __ne__(self, other: object) -> bool:
        """As in PyTorch: a stream is not equal to None, and not unequal to it either."""
        return other is not None and self is not other

    def enqueue(self, work: Callable[[], None]) -> None:
        if self.gpu.recorded is None:
            self.work.append(work)
        else:
            self.gpu.recorded.append(work)

    def wait_event(self, event: Event) -> None:
        assert event.graph is self.gpu.recorded, "a graph and what is outside it cannot wait for each other"
        if event.point is not None and self.gpu.recorded is None:
            self.work.append(event.point)

    def wait_stream(self, other: Stream) -> None:
        event = Event(self.gpu)
        event.record(other)
        self.wait_event(event)

    def synchronize(self) -> None:
        self.gpu.run_until(lambda: not self.work)


class Event:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.cuda_event = len(gpu.events)
        gpu.events.append(self)
        self.point: Point | None = None
        self.graph: list[Callable[[], None]] | None = None

    def record(self, stream: Stream | None = None) -> None:
        stream = stream or self.gpu.current
        self.graph = self.gpu.recorded
        self.point = point = Point()

        def reach() -> None:
            point.is_reached = True

        if self.graph is None:
            stream.work.append(reach)

    def query(self) -> bool:
        return self.point is None or self.point.is_reached

    def synchronize(self) -> None:
        if self.point is not None:
            self.gpu.run_until(lambda: self.point is None or self.point.is_reached)


class Graph:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.work: list[Callable[[], None]] = []

    def instantiate(self) -> None:
        """Complete as soon as it is recorded."""

    def raw_cuda_graph_exec(self) -> int:
        return id(self)

    def replay(self) -> None:
        for work in self.work:
            self.gpu.current.enqueue(work)


class Box:
    """A tensor of one number, on the device or on the host."""

    requires_grad = False

    def __init__(self, gpu: Gpu, value: float = float("nan"), kind: str = "cuda") -> None:
        self.gpu = gpu
        self.value = value
        self.device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)

    def _become(self, value: Callable[[], float], *others: Box) -> Box:
        def work() -> None:
            self.value = value()

        if {box.device.type for box in (self, *others)} == {"cpu"}:
            work()
        else:
            self.gpu.current.enqueue(work)
        return self

    def copy_(self, source: Box, non_blocking: bool = False) -> Box:
        return self._become(lambda: source.value, source)

    def zero_(self) -> Box:
        return self._become(lambda: 0.0)

    def twice(self, source: Box) -> Box:
        return self._become(lambda: 2 * source.value, source)

    def to(self, dtype: torch.dtype, copy: bool = False) -> Box:
        return Box(self.gpu, kind=self.device.type).copy_(self)

    def clone(self) -> Box:
        return Box(self.gpu, kind=self.device.type).copy_(self)

    def detach(self) -> Box:
        return self

    def is_pinned(self) -> bool:
        return False

    def record_stream(self, stream: Stream) -> None:
        """Memory is never freed here."""


class Gpu:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._favourites: dict[int, float] = {}
        self.streams: list[Stream] = []
        self.events: list[Event] = []
        self.current = self.stream()
        self.recorded: list[Callable[[], None]] | None = None
        """Work of the graph being recorded."""

    def stream(self, *_: Any, **__: Any) -> Stream:
        made = Stream(self, len(self.streams))
        self.streams.append(made)
        self._favourites[made.cuda_stream] = self._random.random() ** 3
        return made

    def event(self, *_: Any, **__: Any) -> Event:
        return Event(self)

    def cuEventRecord(self, event: ctypes.c_void_p, stream: ctypes.c_void_p) -> int:
        """As in the driver."""
        self.events[event.value or 0].record(self.streams[stream.value or 0])
        return 0

    def cuEventQuery(self, event: ctypes.c_void_p) -> int:
        """As in the driver."""
        return 0 if self.events[event.value or 0].query() else 600

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def recording(self) -> Iterator[list[Callable[[], None]]]:
        assert self.recorded is None
        made: list[Callable[[], None]] = []
        self.recorded = made
        try:
            yield made
        finally:
            self.recorded = None

    @contextmanager
    def capture(self, graph: Graph, stream: Stream, **_: Any) -> Iterator[None]:
        with self.on(stream), self.recording() as work:
            yield
        graph.work = work

    def run_until(self, is_enough: Callable[[], bool]) -> None:
        while not is_enough():
            ready = [
                s
                for s in self.streams
                if s.work and (not isinstance(s.work[0], Point) or s.work[0].is_reached)
            ]
            assert ready, "every stream waits for another"
            weights = [self._favourites[stream.cuda_stream] + 1e-6 for stream in ready]
            work = self._random.choices(ready, weights)[0].work.popleft()
            if not isinstance(work, Point):
                work()

    def synchronize(self, *_: Any) -> None:
        self.run_until(lambda: not any(stream.work for stream in self.streams))

    def stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replacement for `torch.cuda`."""
        for name, value in {
            "Stream": self.stream,
            "Event": self.event,
            "stream": self.on,
            "device": nullcontext,
            "current_stream": lambda *_: self.current,
            "current_device": lambda: 0,
            "synchronize": self.synchronize,
            "CUDAGraph": lambda keep_graph: Graph(self),
            "is_current_stream_capturing": lambda: self.recorded is not None,
            "graph": self.capture,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        for name, value in {
            "current_stream": lambda index: self.current.cuda_stream,
            "current_device": lambda: 0,
            "is_capturing": lambda: self.recorded is not None,
        }.items():
            monkeypatch.setattr(FAST_PATHS, name, value)
        monkeypatch.setattr(streams, "_free", defaultdict(dict))
        monkeypatch.setattr(streams, "_created", Counter())
        monkeypatch.setattr(streams, "_DedicatedStream", lambda handle, device: self.streams[handle])
        monkeypatch.setattr(streams, "_create", lambda index: self.stream().cuda_stream)
        monkeypatch.setattr(streams, "gil_holding_function", lambda name: getattr(self, name))
