"""Asynchronous calls of an engine, each on one of the engine's streams, with a future of its result.

One thread makes all calls whose plan exists: it keeps as many in flight as the plan has buffers, and completes them in
order. One thread per call would spend its time waiting for the GIL. Calls that need a new plan, and all calls on the
CPU, have a thread each.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from escalade.device.streams import dedicated_stream
from escalade.engine.graph.trees import flatten

THREAD = "escalade-call"


class Pending(Future[Any]):
    """Future of a call's result, which can also be awaited."""

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()


class CallQueue:
    """Threads that make up to `most` calls at a time; they end with this object."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._pool = ThreadPoolExecutor(most + 1, THREAD)
        self._streams: list[torch.cuda.Stream] = []
        self._waiting: deque[_StreamCall] = deque()
        self._is_serving = False
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], Any], device: torch.device, is_ready: bool) -> Pending:
        """Enqueue a call; `is_ready` promises that its plan exists."""
        pending = Pending()
        if device.type != "cuda":
            self._pool.submit(_run, pending, call)
            return pending
        call_on_stream = _StreamCall(pending, call, device)
        if not is_ready:
            self._pool.submit(_run_on_own_stream, call_on_stream)
            return pending
        with self._lock:
            self._waiting.append(call_on_stream)
            is_serving, self._is_serving = self._is_serving, True
        if not is_serving:
            self._pool.submit(self._serve, device)
        return pending

    def _serve(self, device: torch.device) -> None:
        try:
            self._serve_all(device)
        except BaseException as error:
            with self._lock:
                left, self._waiting, self._is_serving = self._waiting, deque(), False
            for each in left:
                each.fail(error)

    def _serve_all(self, device: torch.device) -> None:
        """Make calls until none is waiting or in flight."""
        while len(self._streams) < self._most:
            self._streams.append(dedicated_stream(device))
        free = deque(self._streams)
        running: deque[tuple[_StreamCall, torch.cuda.Stream]] = deque()
        while True:
            while free and (next_one := self._next(is_idle=not running)) is not None:
                if next_one.begin(free[0]):
                    running.append((next_one, free.popleft()))
            if not running:
                return
            oldest, stream = running.popleft()
            oldest.end()
            free.append(stream)

    def _next(self, is_idle: bool) -> _StreamCall | None:
        """Return the next waiting call. If there is none and nothing is in flight, mark this thread as finished."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            if is_idle:
                self._is_serving = False
            return None


def _run(pending: Pending, call: Callable[[], Any]) -> None:
    if not pending.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        pending.set_exception(error)
    else:
        pending.set_result(result)


def _run_on_own_stream(call_on_stream: _StreamCall) -> None:
    if call_on_stream.begin(dedicated_stream(call_on_stream.device)):
        call_on_stream.end()


class _StreamCall:
    """A call on another stream than the caller's, ordered after the work enqueued on the caller's stream so far."""

    def __init__(self, pending: Pending, call: Callable[[], Any], device: torch.device) -> None:
        self.device = device
        self._pending = pending
        self._call = call
        self._caller_stream = torch.cuda.current_stream(device)
        self._caller_event = torch.cuda.Event()
        self._caller_event.record(self._caller_stream)
        self._done = torch.cuda.Event()
        self._result: Any = None

    def begin(self, stream: torch.cuda.Stream) -> bool:
        """Enqueue the call; return False if it was cancelled or failed."""
        if not self._pending.set_running_or_notify_cancel():
            return False
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(stream):
                stream.wait_event(self._caller_event)
                self._result = self._call()
                self._done.record(stream)
        except BaseException as error:
            self._pending.set_exception(error)
            return False
        return True

    def fail(self, error: BaseException) -> None:
        if self._pending.set_running_or_notify_cancel():
            self._pending.set_exception(error)

    def end(self) -> None:
        """Wait for the GPU and complete the future."""
        try:
            self._done.synchronize()
            for tensor in flatten(self._result)[0]:
                tensor.record_stream(
                    self._caller_stream
                )  # the caller may drop it while its stream still reads it
        except BaseException as error:
            self._pending.set_exception(error)
        else:
            self._pending.set_result(self._result)
