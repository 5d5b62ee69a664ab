"""An engine fed from host memory: copies in, compute and copies back at once, each on a CUDA stream of its own.

A thread pulls batches, stages each in a free slot's pinned memory and starts all of its GPU work; events order the
streams. Whoever iterates waits for the oldest slot, copies its results out of pinned memory into their own
(page-locked memory is scarce, and a list of all results must not hold it) and frees the slot. The number of slots is
fixed, so memory does not depend on the number of batches.

On the CPU and on the twin the thread only stages batches ahead; they are computed by whoever iterates.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils import _pytree as pytree

from escalade.device.staging import StagingBuffer, is_dense
from escalade.device.streams import dedicated_stream
from escalade.engine.calls import Calls
from escalade.engine.graph.forms import require_dense
from escalade.engine.plan.plan import Plan
from escalade.errors import UnsupportedError

THREAD = "escalade-stream"
PATIENCE = 0.5
"""Seconds that a producer has to give its last batch, once nobody wants it; then its thread is left to itself."""
AWAKE = 0.2
"""Seconds that whoever iterates waits at a time."""
MOST_DEPTH = 4096
_HOST = torch.device("cpu")
logger = logging.getLogger("escalade")


class Streamed(Protocol):
    """An engine as streaming sees it."""

    @property
    def device(self) -> torch.device: ...

    def flatten(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """The tensors of a call in the order of the graph's inputs."""

    def calls(self, tensors: Sequence[torch.Tensor]) -> Calls:
        """The plan for inputs like these, made ready to be called with them."""

    def returned(self, results: list[torch.Tensor], plan: Plan) -> Any:
        """A call's results in the structure that the model returns."""


def stream(
    engine: Streamed, batches: Iterable[Any], *, depth: int = 2, then: Callable[[Any], Any] | None = None
) -> Generator[Any, None, None]:
    """What the engine returns for each batch, in order, as CPU tensors; or what `then` makes of it, a tensor or a
    structure of them, on the engine's device before it is copied back.

    A batch is a host tensor or NumPy array, or a tuple of them for a model of several inputs; sizes may vary. It may
    also be on the engine's own GPU, as of a decoder there, made on the stream that is current for the producer.
    `depth` batches wait while one is computed (on a GPU another is on its way back). A batch is copied before the
    next is asked for, so a producer may fill the same memory again; but pinned tensors are read in place, and must
    stay as they are until their result has come. What the producer raises, or the engine about a batch, is raised
    here after the results before it. Closing the iterator early stops the thread, closes a producer that is a
    generator, and waits for what is under way; a producer that blocks is not waited for: it is left to itself, without
    any of the iteration's memory, and closed when it returns.
    """
    if not isinstance(depth, int) or not 1 <= depth <= MOST_DEPTH:
        raise UnsupportedError(
            f"depth={depth!r}: at least one batch is staged ahead, and up to {MOST_DEPTH:,}, which each take memory"
        )
    if not isinstance(batches, Iterable):
        raise UnsupportedError(
            f"the batches are of type {type(batches).__name__}; stream takes a list or an iterator"
        )
    if then is not None and not callable(then):
        raise UnsupportedError(f"then={then!r}: it is a function of what the engine returns")
    return _results(_Finished(engine, then), batches, depth)


class _Finished:
    """An engine's calls, with what is made of their results."""

    def __init__(self, engine: Streamed, then: Callable[[Any], Any] | None) -> None:
        self.engine = engine
        self._then = then

    def run(self, calls: Calls, given: Sequence[torch.Tensor]) -> _Made:
        """A call, on the current stream."""
        results = calls.call(given)
        if self._then is None:
            return _Made(results, partial(self.engine.returned, plan=calls.plan))
        tensors, structure = pytree.tree_flatten(self._then(self.engine.returned(results, calls.plan)))
        for each in tensors:
            if not isinstance(each, torch.Tensor):
                raise UnsupportedError(
                    f"then has returned a {type(each).__name__}; it returns a tensor, or tensors in lists and dicts"
                )
        return _Made(tensors, structure.unflatten)


@dataclass(frozen=True)
class _Made:
    """The tensors that a call has made, and how they are put together."""

    tensors: list[torch.Tensor]
    together: Callable[[list[torch.Tensor]], Any]


def _results(finished: _Finished, batches: Iterable[Any], depth: int) -> Generator[Any, None, None]:
    engine = finished.engine
    lanes = _Lanes.on(engine.device) if engine.device.type == "cuda" else None
    slots: list[_Slot] = [
        _HostSlot(finished) if lanes is None else _DeviceSlot(finished, lanes)
        for _ in range(depth + (1 if lanes is None else 2))
    ]
    feeder = _Feeder(slots, None if lanes is None else lanes.device)
    # A daemon: neither an iterator that nobody closed nor a producer that blocks may keep the interpreter from ending.
    thread = threading.Thread(target=feeder.run, args=(batches,), name=THREAD, daemon=True)
    thread.start()
    try:
        while not isinstance(number := _received(feeder.sent), _End):
            made = slots[number].receive()
            feeder.free.put(number)
            yield made.together(made.tensors)
        number.settle()
    finally:
        try:
            feeder.leave(thread)
        finally:
            if lanes is not None:
                lanes.synchronize()
            slots.clear()  # a thread that is left to itself keeps nothing of them


def _received(sent: SimpleQueue[int | _End]) -> int | _End:
    """What the feeder sends next. The wait is in short pieces: where a library has set a handler after which waits go
    on, Ctrl-C would come only when one ends.
    """
    while True:
        with contextlib.suppress(Empty):
            return sent.get(timeout=AWAKE)


@dataclass
class _End:
    """No more batches: the producer has none, or it or the engine raised."""

    error: BaseException | None = None

    def settle(self) -> None:
        """Raises it and forgets it: through its traceback it would keep itself, and every slot, alive."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error


class _Slot(Protocol):
    """A place for one batch on its way through. One at a time: the feeder sends, the consumer receives."""

    def send(self, batch: Any) -> None: ...

    def receive(self) -> _Made: ...


@dataclass(frozen=True)
class _Lanes:
    """The three streams of one iteration."""

    device: torch.device
    inward: torch.cuda.Stream
    compute: torch.cuda.Stream
    outward: torch.cuda.Stream

    @staticmethod
    def on(device: torch.device) -> _Lanes:
        exact = _exact(device)
        return _Lanes(exact, *(dedicated_stream(exact) for _ in range(3)))

    def synchronize(self) -> None:
        for lane in (self.inward, self.compute, self.outward):
            lane.synchronize()


class _Doing(Enum):
    """What the feeder's thread is at."""

    FILLING = auto()
    """A slot; or about to ask. It will not take long."""
    ASKING = auto()
    """It is in the producer's hands, which may be for ever."""
    DONE = auto()


class _Feeder:
    """The thread's work: from the producer into free slots, which are known by their numbers."""

    def __init__(self, slots: list[_Slot], device: torch.device | None) -> None:
        self.free: SimpleQueue[int | None] = SimpleQueue()
        self.sent: SimpleQueue[int | _End] = SimpleQueue()
        self._slots = slots
        self._device = device
        self._doing = _Doing.FILLING
        self._is_left = False
        self._changed = threading.Condition()
        for number in range(len(slots)):
            self.free.put(number)

    def leave(self, thread: threading.Thread) -> None:
        """Nobody wants more batches. When it returns, the thread uses no slot any more."""
        with self._changed:
            self._is_left = True
            self.free.put(None)
            if threading.current_thread() is thread:  # where garbage collection closes a forgotten iterator
                return
            self._changed.wait_for(lambda: self._doing is not _Doing.FILLING)
            is_done = self._changed.wait_for(lambda: self._doing is _Doing.DONE, PATIENCE)
        if is_done:
            thread.join()

    def run(self, batches: Iterable[Any]) -> None:
        producer: Iterator[Any] | None = None
        try:
            with contextlib.nullcontext() if self._device is None else torch.cuda.device(self._device):
                if self._set(_Doing.ASKING):
                    producer = iter(batches)
                    self._feed(producer)
        except BaseException as error:  # to be raised where the results are awaited, in its place among them
            self.sent.put(_End(error))
        else:
            self.sent.put(_End())
        finally:
            self._set(_Doing.ASKING)
            _close(producer)
            self._set(_Doing.DONE)

    def _feed(self, producer: Iterator[Any]) -> None:
        while self._set(_Doing.FILLING) and (number := self.free.get()) is not None:
            if not self._set(_Doing.ASKING):
                return
            try:
                batch = next(producer)
            except StopIteration:
                return
            if not self._set(_Doing.FILLING):
                return
            self._slots[number].send(batch)
            self.sent.put(number)

    def _set(self, doing: _Doing) -> bool:
        """Whether there is still somebody who waits for batches; who has left is not told of work with slots."""
        with self._changed:
            if not (self._is_left and doing is _Doing.FILLING):
                self._doing = doing
            self._changed.notify_all()
            return not self._is_left


def _close(producer: Iterator[Any] | None) -> None:
    """Runs what a generator does in the end, in the thread that ran the rest of it."""
    if not isinstance(producer, Generator):
        return
    try:
        producer.close()
    except Exception:
        logger.warning("a producer of batches raised when it was closed", exc_info=True)


class _HostSlot:
    """A slot for engines on the CPU and the twin."""

    def __init__(self, finished: _Finished) -> None:
        self._finished = finished
        self._engine = finished.engine
        self._staging = StagingBuffer(_HOST)
        self._given: list[torch.Tensor] = []

    def send(self, batch: Any) -> None:
        self._given = _staged(_tensors(self._engine, batch), self._staging)

    def receive(self) -> _Made:
        return self._finished.run(self._engine.calls(self._given), self._given)


class _DeviceSlot:
    """A slot for engines on a GPU. It is free again when its results are on the host, so no earlier event needs waiting
    for.

    It has inputs of its own, which kernels read where they are: it is filled whenever a DMA engine is free.
    """

    def __init__(self, finished: _Finished, lanes: _Lanes) -> None:
        self._finished = finished
        self._engine = finished.engine
        self._lanes = lanes
        self._staging = StagingBuffer(_HOST, pinned=True)
        self._inputs = StagingBuffer(lanes.device)
        self._returns = StagingBuffer(_HOST, pinned=True)
        self._arrived, self._computed = torch.cuda.Event(), torch.cuda.Event()
        self._returned = torch.cuda.Event(blocking=True)  # sleeping leaves the core to whoever makes batches
        self._made = _Made([], list)
        self._kept: list[Calls | torch.Tensor] = []
        """The program, the caller's tensors and the results live until they have been used."""

    def send(self, batch: Any) -> None:
        """Memory is allocated on the stream that first uses it, as PyTorch's allocator expects."""
        lanes, tensors = self._lanes, _tensors(self._engine, batch)
        with torch.cuda.stream(lanes.inward):
            given = self._inputs.like(tensors)
        calls = self._engine.calls(given)
        here = tensors[0].device.type == "cuda"
        ready = here or all(tensor.is_pinned() and is_dense(tensor) for tensor in tensors)
        sources = tensors if ready else _staged(tensors, self._staging)
        self._kept = [calls, *sources]
        producer = torch.cuda.current_stream(lanes.device)
        if here:
            lanes.inward.wait_stream(producer)
        with torch.cuda.stream(lanes.inward):
            _copy(sources, given)
            self._arrived.record(lanes.inward)
        if here:  # whoever made the batch may write over it
            producer.wait_event(self._arrived)
        with torch.cuda.stream(lanes.compute):
            lanes.compute.wait_event(self._arrived)
            computed = self._finished.run(calls, given)
            self._computed.record(lanes.compute)
        self._kept += computed.tensors
        with torch.cuda.stream(lanes.outward):
            lanes.outward.wait_event(self._computed)
            self._made = replace(computed, tensors=self._returns.like(computed.tensors))
            _copy(computed.tensors, self._made.tensors)
            self._returned.record(lanes.outward)

    def receive(self) -> _Made:
        self._returned.synchronize()
        self._kept = []
        return replace(self._made, tensors=[result.clone() for result in self._made.tensors])


def _exact(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _tensors(engine: Streamed, batch: Any) -> tuple[torch.Tensor, ...]:
    arguments = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    tensors = engine.flatten(pytree.tree_map(_as_tensor, arguments), {})
    require_dense(tensors, "a batch is", "stream takes dense tensors")
    places = {tensor.device for tensor in tensors}
    if not (places <= {_HOST} or (engine.device.type == "cuda" and places == {_exact(engine.device)})):
        named = " and ".join(sorted(map(str, places)))
        raise UnsupportedError(
            f"stream takes batches in host memory or on the engine's own GPU, and this one is on {named}; the engine "
            f"is on {engine.device}"
        )
    return tuple(tensor.detach() for tensor in tensors)


def _as_tensor(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray):
        return leaf
    if not leaf.flags.writeable or any(stride < 0 or stride % leaf.itemsize for stride in leaf.strides):
        leaf = leaf.copy(
            order="K"
        )  # PyTorch takes none of these: fields of records have strides between elements
    return torch.from_numpy(leaf)


def _staged(tensors: Sequence[torch.Tensor], staging: StagingBuffer) -> list[torch.Tensor]:
    rooms = staging.like(tensors)
    _copy(tensors, rooms)
    return rooms


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
