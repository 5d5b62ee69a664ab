"""CUDA streams with a single user, and events that mark their progress.

PyTorch hands out its streams round-robin from a pool of 32. Two users of the same stream would capture each other's
work into their CUDA graphs.
"""

from __future__ import annotations

import ctypes
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import partial

import torch

from escalade.device.driver import check, gil_holding_function, make_context_current

_NOT_READY = 600  # CUDA_ERROR_NOT_READY
_MOST = 32  # compute streams created for new threads; beyond that, any free one is reused
_lock = threading.Lock()
_Kind = tuple[int, bool]
"""Device index, and True if PyTorch's operators run on the stream."""
_free: defaultdict[_Kind, dict[int, int]] = defaultdict(dict)
"""Free streams, each with the thread that used it last. Never destroyed: PyTorch's allocator keeps querying them."""
_created: Counter[_Kind] = Counter()


class _DedicatedStream(torch.cuda.ExternalStream):
    """Stream that returns to the free list when it is deleted.

    Uses `__del__`, because PyTorch deletes stream objects without clearing weak references.
    """

    user, computes = 0, False

    def __del__(self, free: Mapping[_Kind, dict[int, int]] = _free) -> None:
        free[self.device_index, self.computes][self.cuda_stream] = self.user


def dedicated_stream(device: torch.device | int, *, computes: bool = False) -> torch.cuda.Stream:
    """Return a stream of a GPU that nothing else uses while the returned object is alive.

    If PyTorch `computes` on it, a thread preferably gets a stream that it had before: cuBLAS keeps a workspace (32 MiB
    on Hopper) for every pair of thread and stream.
    """
    index, thread = _index(device), threading.get_ident()
    kind = (index, computes)
    with _lock:
        free = _free[kind]
        own = [
            stream for stream in list(free) if free[stream] == thread
        ]  # a copy: streams may be freed meanwhile
        handle = own[-1] if own else None
        if handle is None and (not computes or _created[kind] >= _MOST):
            handle = next(iter(free), None)
        if handle is None:
            _created[kind] += 1
        else:
            del free[handle]
    handle = _create(index) if handle is None else handle
    stream = _DedicatedStream(handle, device=torch.device("cuda", index))
    stream.user, stream.computes = thread, computes
    return stream


def _index(device: torch.device | int) -> int:
    index = device if isinstance(device, int) else device.index
    return torch.cuda.current_device() if index is None else index


def _create(index: int) -> int:
    from cuda.bindings import driver

    torch.cuda.init()
    with torch.cuda.device(index):
        make_context_current(
            index
        )  # a new thread has none, and torch.cuda.device skips it for the current index
        flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return int(check(driver.cuStreamCreate(flags), "creating a stream"))


class StreamMarker:
    """Event that is cheap to record and query while many threads compete for the GIL.

    PyTorch's `Event.record` releases it.
    With other threads waiting for it, reacquiring it takes longer than recording.
    """

    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        self._record: Callable[[ctypes.c_void_p], int] | None = None
        self._query: Callable[[], int] | None = None

    def record(self, stream: int, has_room: bool) -> None:
        """Record the event on the current stream, whose raw handle is `stream`.

        `has_room` means that the stream's queue is not full: the call cannot block, so the GIL can be kept.
        """
        if self._record is not None and has_room and not self._record(ctypes.c_void_p(stream)):
            return
        self.event.record()  # also after a driver error, because PyTorch reports its reason
        if self._record is None:  # PyTorch creates the event when it is first recorded
            handle = ctypes.c_void_p(self.event.cuda_event)
            self._record = partial(gil_holding_function("cuEventRecord"), handle)
            self._query = partial(gil_holding_function("cuEventQuery"), handle)

    def is_done(self) -> bool:
        """Return True if all work before the last `record` has finished, or nothing was recorded."""
        status = 0 if self._query is None else self._query()
        if status in (0, _NOT_READY):
            return status == 0
        return self.event.query()  # PyTorch reports the reason of a driver error
