"""Calls that nobody waits for: each in a thread and on a stream of an engine's own, with a future of its result."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from escalade.engine.graph.trees import flatten

THREAD = "escalade-call"


class Pending(Future[Any]):
    """A call's result to come: `result()` waits for it, and so does `await`."""

    def __await__(self) -> Generator[Any, None, Any]:
        return asyncio.wrap_future(self).__await__()


class Submitted:
    """Threads that make calls, so many at a time. They are gone when this is."""

    def __init__(self, most: int) -> None:
        self._pool = ThreadPoolExecutor(most, THREAD)
        self._local = threading.local()

    def submit(self, call: Callable[[], Any], device: torch.device) -> Pending:
        pending = Pending()
        if device.type == "cuda":
            call = _Ordered(call, device, self._local)
        self._pool.submit(_run, pending, call)
        return pending


def _run(pending: Pending, call: Callable[[], Any]) -> None:
    if not pending.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:
        pending.set_exception(error)
    else:
        pending.set_result(result)


class _Ordered:
    """A call on a stream of the thread that makes it: behind what the caller's stream has been given by now, and over
    when it returns."""

    def __init__(self, call: Callable[[], Any], device: torch.device, local: threading.local) -> None:
        self._call = call
        self._device = device
        self._local = local
        self._callers = torch.cuda.current_stream(device)
        self._given = torch.cuda.Event()
        self._given.record(self._callers)

    def __call__(self) -> Any:
        with torch.cuda.device(self._device), torch.cuda.stream(own := self._stream()):
            own.wait_event(self._given)
            result = self._call()
            done = torch.cuda.Event(blocking=True)  # sleeping leaves the core to others
            done.record(own)
            done.synchronize()
        for tensor in flatten(result)[0]:
            tensor.record_stream(self._callers)  # who lets go of it may still be reading
        return result

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self._device)
        return self._local.stream
