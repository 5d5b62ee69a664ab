"""Calls that nobody waits for: each on a stream of an engine's own, with a future of its result.

A call whose plan is ready is made by one thread, which has as many under way as the plan has buffers, and hands out
results in their order: threads that make a call each would spend their time waiting for the interpreter's lock. A call
that makes a plan has a thread to itself meanwhile, and so has every one on the CPU.
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
    """A call's result to come: `result()` waits for it, and so does `await`."""

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()


class Submitted:
    """Threads that make calls, so many at a time. They are gone when this is."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._pool = ThreadPoolExecutor(most + 1, THREAD)
        self._streams: list[torch.cuda.Stream] = []
        self._waiting: deque[_Ordered] = deque()
        self._is_served = False
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], Any], device: torch.device, is_ready: bool) -> Pending:
        """`is_ready` says that the call has nothing to make."""
        pending = Pending()
        if device.type != "cuda":
            self._pool.submit(_run, pending, call)
            return pending
        ordered = _Ordered(pending, call, device)
        if not is_ready:
            self._pool.submit(_alone, ordered)
            return pending
        with self._lock:
            self._waiting.append(ordered)
            is_served, self._is_served = self._is_served, True
        if not is_served:
            self._pool.submit(self._serve, device)
        return pending

    def _serve(self, device: torch.device) -> None:
        try:
            self._serve_all(device)
        except BaseException as error:
            with self._lock:
                left, self._waiting, self._is_served = self._waiting, deque(), False
            for each in left:
                each.fail(error)

    def _serve_all(self, device: torch.device) -> None:
        """Until none is waiting and none under way."""
        while len(self._streams) < self._most:
            self._streams.append(dedicated_stream(device))
        free = deque(self._streams)
        running: deque[tuple[_Ordered, torch.cuda.Stream]] = deque()
        while True:
            while free and (next_one := self._next(is_idle=not running)) is not None:
                if next_one.begin(free[0]):
                    running.append((next_one, free.popleft()))
            if not running:
                return
            oldest, stream = running.popleft()
            oldest.end()
            free.append(stream)

    def _next(self, is_idle: bool) -> _Ordered | None:
        """Who waits for longest; if nobody does, and nothing is under way, whoever comes starts anew."""
        with self._lock:
            if self._waiting:
                return self._waiting.popleft()
            if is_idle:
                self._is_served = False
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


def _alone(ordered: _Ordered) -> None:
    if ordered.begin(dedicated_stream(ordered.device)):
        ordered.end()


class _Ordered:
    """A call on another stream than the caller's: behind what the caller's has been given by now, and over when its
    result is there."""

    def __init__(self, pending: Pending, call: Callable[[], Any], device: torch.device) -> None:
        self.device = device
        self._pending = pending
        self._call = call
        self._callers = torch.cuda.current_stream(device)
        self._given = torch.cuda.Event()
        self._given.record(self._callers)
        self._done = torch.cuda.Event()
        self._result: Any = None

    def begin(self, stream: torch.cuda.Stream) -> bool:
        """Whether it is under way now, and not cancelled or failed."""
        if not self._pending.set_running_or_notify_cancel():
            return False
        try:
            with torch.cuda.device(self.device), torch.cuda.stream(stream):
                stream.wait_event(self._given)
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
        """Waits for it, and hands out the result."""
        try:
            self._done.synchronize()
            for tensor in flatten(self._result)[0]:
                tensor.record_stream(self._callers)  # who lets go of it may still be reading
        except BaseException as error:
            self._pending.set_exception(error)
        else:
            self._pending.set_result(self._result)
