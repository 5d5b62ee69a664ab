"""Feed an engine from host memory: H2D copies, compute and D2H copies overlap, each on a CUDA stream of its own.

A thread pulls batches, stages each in the pinned memory of a free slot and enqueues all of its GPU work; events order
the streams. The consumer waits for the oldest slot, copies its results out of pinned memory (which is scarce: a list of
all results must not hold it) and frees the slot. The number of slots is fixed, so memory does not depend on the number
of batches.

On the CPU and on the twin the thread only stages batches; the consumer computes them.
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
PRODUCER_TIMEOUT = 0.5
"""Seconds to wait for a blocked producer when the iterator is closed; then its thread is abandoned."""
POLL_SECONDS = 0.2
"""Longest single wait of the consumer, so that Ctrl-C is noticed."""
MAX_DEPTH = 4096
_HOST = torch.device("cpu")
logger = logging.getLogger("escalade")


class StreamableEngine(Protocol):
    """The part of an engine's interface that streaming uses."""

    @property
    def device(self) -> torch.device: ...

    def flatten(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
        """Return the tensors of a call in the order of the graph's inputs."""

    def calls(self, tensors: Sequence[torch.Tensor]) -> Calls:
        """Return the callable plan for inputs like these."""

    def unflatten(self, results: list[torch.Tensor], plan: Plan) -> Any:
        """Return a call's results in the structure that the model returns."""


def stream(
    engine: StreamableEngine,
    batches: Iterable[Any],
    *,
    depth: int = 2,
    then: Callable[[Any], Any] | None = None,
) -> Generator[Any, None, None]:
    """Yield the engine's results for each batch, in order, as CPU tensors.

    `then` post-processes the results on the engine's device before they are copied back; it returns a tensor or a
    structure of tensors.

    A batch is a host tensor or NumPy array, or a tuple of them for a model with several inputs; sizes may vary. It may
    also be on the engine's own GPU (from a decoder, for example), written on the producer's current stream. `depth`
    batches are staged while one is computed (and, on a GPU, another is copied back).

    A batch is copied before the next one is requested, so a producer may reuse its memory. Exception: pinned tensors
    are read in place and must not change until their result has been returned.

    Exceptions of the producer, and of the engine about a batch, are raised here after all earlier results. Closing the
    iterator early stops the thread, closes a producer that is a generator, and waits for work in flight. A producer
    that blocks is abandoned after a moment, without any of the iteration's memory, and closed when it returns.
    """
    if not isinstance(depth, int) or not 1 <= depth <= MAX_DEPTH:
        raise UnsupportedError(
            f"depth={depth!r}: pass the number of batches to stage ahead, 1 to {MAX_DEPTH:,}; each takes memory"
        )
    if not isinstance(batches, Iterable):
        raise UnsupportedError(f"batches is of type {type(batches).__name__}; pass a list or an iterator")
    if then is not None and not callable(then):
        raise UnsupportedError(f"then={then!r}: pass a function of the engine's results")
    return _results(engine, batches, depth, then)


@dataclass(frozen=True)
class _BatchResult:
    """The result tensors of a call, and the function that puts them into the returned structure."""

    tensors: list[torch.Tensor]
    unflatten: Callable[[list[torch.Tensor]], Any]


def _results(
    engine: StreamableEngine, batches: Iterable[Any], depth: int, then: Callable[[Any], Any] | None
) -> Generator[Any, None, None]:
    streams = _Streams.on(engine.device) if engine.device.type == "cuda" else None
    slots: list[_Slot] = [
        _HostSlot(engine, then) if streams is None else _DeviceSlot(engine, then, streams)
        for _ in range(depth + (1 if streams is None else 2))
    ]
    feeder = _Feeder(slots, None if streams is None else streams.device)
    # A daemon: neither an iterator that was never closed nor a blocked producer may keep the interpreter alive.
    thread = threading.Thread(target=feeder.run, args=(batches,), name=THREAD, daemon=True)
    thread.start()
    try:
        while not isinstance(number := _next_message(feeder.sent), _EndOfBatches):
            result = slots[number].receive()
            feeder.free.put(number)
            yield result.unflatten(result.tensors)
        number.raise_error()
    finally:
        try:
            feeder.stop(thread)
        finally:
            if streams is not None:
                streams.synchronize()
            slots.clear()  # an abandoned thread must not keep their memory


def _next_message(sent: SimpleQueue[int | _EndOfBatches]) -> int | _EndOfBatches:
    # Wait in short intervals: with signal handlers of some libraries a wait resumes after Ctrl-C, which would then only
    # be noticed when the wait ends.
    while True:
        with contextlib.suppress(Empty):
            return sent.get(timeout=POLL_SECONDS)


@dataclass
class _EndOfBatches:
    """Sent after the last batch; `error` is what the producer or the engine raised."""

    error: BaseException | None = None

    def raise_error(self) -> None:
        """Raise the error, if any, and drop it: its traceback refers back to this object and every slot."""
        error, self.error = self.error, None
        try:
            if error is not None:
                raise error
        finally:
            del error


class _Slot:
    """Buffers for one batch in flight. The feeder sends, then the consumer receives, one at a time."""

    def __init__(self, engine: StreamableEngine, then: Callable[[Any], Any] | None) -> None:
        self._engine = engine
        self._then = then

    def send(self, batch: Any) -> None:
        raise NotImplementedError

    def receive(self) -> _BatchResult:
        raise NotImplementedError

    def _run(self, calls: Calls, inputs: Sequence[torch.Tensor]) -> _BatchResult:
        """Run one call on the current stream, and `then` on its results."""
        results = calls.call(inputs)
        if self._then is None:
            return _BatchResult(results, partial(self._engine.unflatten, plan=calls.plan))
        tensors, structure = pytree.tree_flatten(self._then(self._engine.unflatten(results, calls.plan)))
        for each in tensors:
            if not isinstance(each, torch.Tensor):
                raise UnsupportedError(
                    f"then returned a {type(each).__name__}; it must return a tensor, or tensors in lists and dicts"
                )
        return _BatchResult(tensors, structure.unflatten)


@dataclass(frozen=True)
class _Streams:
    """The three CUDA streams of one iteration."""

    device: torch.device
    h2d: torch.cuda.Stream
    compute: torch.cuda.Stream
    d2h: torch.cuda.Stream

    @staticmethod
    def on(device: torch.device) -> _Streams:
        exact = _with_index(device)
        return _Streams(exact, *(dedicated_stream(exact) for _ in range(3)))

    def synchronize(self) -> None:
        for lane in (self.h2d, self.compute, self.d2h):
            lane.synchronize()


class _FeederState(Enum):
    """State of the feeder thread."""

    FILLING = auto()
    """Filling a slot or about to ask the producer; this ends soon."""
    ASKING = auto()
    """Waiting for the producer, possibly forever."""
    DONE = auto()


class _Feeder:
    """Moves batches from the producer into free slots, in a thread. Slots are passed around by number."""

    def __init__(self, slots: list[_Slot], device: torch.device | None) -> None:
        self.free: SimpleQueue[int | None] = SimpleQueue()
        self.sent: SimpleQueue[int | _EndOfBatches] = SimpleQueue()
        self._slots = slots
        self._device = device
        self._state = _FeederState.FILLING
        self._is_stopped = False
        self._changed = threading.Condition()
        for number in range(len(slots)):
            self.free.put(number)

    def stop(self, thread: threading.Thread) -> None:
        """Stop feeding. When this returns, the thread no longer uses any slot."""
        with self._changed:
            self._is_stopped = True
            self.free.put(None)
            if (
                threading.current_thread() is thread
            ):  # garbage collection closed an abandoned iterator in this thread
                return
            self._changed.wait_for(lambda: self._state is not _FeederState.FILLING)
            is_done = self._changed.wait_for(lambda: self._state is _FeederState.DONE, PRODUCER_TIMEOUT)
        if is_done:
            thread.join()

    def run(self, batches: Iterable[Any]) -> None:
        producer: Iterator[Any] | None = None
        try:
            with contextlib.nullcontext() if self._device is None else torch.cuda.device(self._device):
                if self._set(_FeederState.ASKING):
                    producer = iter(batches)
                    self._feed(producer)
        except BaseException as error:  # raised by the consumer, after the results before it
            self.sent.put(_EndOfBatches(error))
        else:
            self.sent.put(_EndOfBatches())
        finally:
            self._set(_FeederState.ASKING)
            _close(producer)
            self._set(_FeederState.DONE)

    def _feed(self, producer: Iterator[Any]) -> None:
        while self._set(_FeederState.FILLING) and (number := self.free.get()) is not None:
            if not self._set(_FeederState.ASKING):
                return
            try:
                batch = next(producer)
            except StopIteration:
                return
            if not self._set(_FeederState.FILLING):
                return
            self._slots[number].send(batch)
            self.sent.put(number)

    def _set(self, state: _FeederState) -> bool:
        """Set the state and return True while the consumer wants batches; a stopped feeder never fills again."""
        with self._changed:
            if not (self._is_stopped and state is _FeederState.FILLING):
                self._state = state
            self._changed.notify_all()
            return not self._is_stopped


def _close(producer: Iterator[Any] | None) -> None:
    """Close a generator in the thread that ran it, so that its `finally` blocks run there, too."""
    if not isinstance(producer, Generator):
        return
    try:
        producer.close()
    except Exception:
        logger.warning("the producer of batches raised when it was closed", exc_info=True)


class _HostSlot(_Slot):
    """Slot for engines on the CPU and the twin."""

    def __init__(self, engine: StreamableEngine, then: Callable[[Any], Any] | None) -> None:
        super().__init__(engine, then)
        self._staging = StagingBuffer(_HOST)
        self._inputs: list[torch.Tensor] = []

    def send(self, batch: Any) -> None:
        self._inputs = _staged(_tensors(self._engine, batch), self._staging)

    def receive(self) -> _BatchResult:
        return self._run(self._engine.calls(self._inputs), self._inputs)


class _DeviceSlot(_Slot):
    """Slot for engines on a GPU.

    It is free again once its results are on the host, so earlier events need no waiting. It has input buffers of its
    own, which kernels read in place, so it can be filled whenever a copy engine is free.
    """

    def __init__(
        self, engine: StreamableEngine, then: Callable[[Any], Any] | None, streams: _Streams
    ) -> None:
        super().__init__(engine, then)
        self._streams = streams
        self._staging = StagingBuffer(_HOST, pinned=True)
        self._inputs = StagingBuffer(streams.device)
        self._returns = StagingBuffer(_HOST, pinned=True)
        self._arrived, self._computed = torch.cuda.Event(), torch.cuda.Event()
        self._returned = torch.cuda.Event(
            blocking=True
        )  # sleep instead of spin: leave the core to the producer
        self._result = _BatchResult([], list)
        self._keep_alive: list[Calls | torch.Tensor] = []
        """References held until the GPU has used them: the program, the caller's tensors, the results."""

    def send(self, batch: Any) -> None:
        # PyTorch's caching allocator requires memory to be allocated on the stream that first uses it.
        streams, tensors = self._streams, _tensors(self._engine, batch)
        with torch.cuda.stream(streams.h2d):
            inputs = self._inputs.like(tensors)
        calls = self._engine.calls(inputs)
        here = tensors[0].device.type == "cuda"
        ready = here or all(tensor.is_pinned() and is_dense(tensor) for tensor in tensors)
        sources = tensors if ready else _staged(tensors, self._staging)
        self._keep_alive = [calls, *sources]
        producer = torch.cuda.current_stream(streams.device)
        if here:
            streams.h2d.wait_stream(producer)
        with torch.cuda.stream(streams.h2d):
            _copy(sources, inputs)
            self._arrived.record(streams.h2d)
        if here:  # the producer may overwrite the batch after the copy
            producer.wait_event(self._arrived)
        with torch.cuda.stream(streams.compute):
            streams.compute.wait_event(self._arrived)
            computed = self._run(calls, inputs)
            self._computed.record(streams.compute)
        self._keep_alive += computed.tensors
        with torch.cuda.stream(streams.d2h):
            streams.d2h.wait_event(self._computed)
            self._result = replace(computed, tensors=self._returns.like(computed.tensors))
            _copy(computed.tensors, self._result.tensors)
            self._returned.record(streams.d2h)

    def receive(self) -> _BatchResult:
        self._returned.synchronize()
        self._keep_alive = []
        return replace(self._result, tensors=[result.clone() for result in self._result.tensors])


def _with_index(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _tensors(engine: StreamableEngine, batch: Any) -> tuple[torch.Tensor, ...]:
    arguments = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    tensors = engine.flatten(pytree.tree_map(_as_tensor, arguments), {})
    require_dense(tensors, "a batch is", "stream takes dense tensors")
    devices = {tensor.device for tensor in tensors}
    if not (devices <= {_HOST} or (engine.device.type == "cuda" and devices == {_with_index(engine.device)})):
        named = " and ".join(sorted(map(str, devices)))
        raise UnsupportedError(
            f"a batch is on {named} and the engine on {engine.device}; stream takes batches in host memory or on the "
            "engine's own GPU"
        )
    return tuple(tensor.detach() for tensor in tensors)


def _as_tensor(leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray):
        return leaf
    if not leaf.flags.writeable or any(stride < 0 or stride % leaf.itemsize for stride in leaf.strides):
        # PyTorch refuses read-only arrays, negative strides, and fields of structured arrays.
        leaf = leaf.copy(order="K")
    return torch.from_numpy(leaf)


def _staged(tensors: Sequence[torch.Tensor], staging: StagingBuffer) -> list[torch.Tensor]:
    staged = staging.like(tensors)
    _copy(tensors, staged)
    return staged


def _copy(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
