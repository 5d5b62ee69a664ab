"""Streams that nobody else has.

PyTorch's streams come from a pool of 32, which everybody is given in turn: who records a CUDA graph on one of them
records what another thread, which was given the same, does meanwhile, and who enqueues work on one may do so in the
midst of what a caller is recording.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Mapping

import torch

from escalade.device.driver import check, make_context_current

_MOST = 32
"""Streams to compute on that are created for threads that have none; beyond that, any free one is taken."""
_lock = threading.Lock()
_Kind = tuple[int, bool]
"""A device's index, and whether PyTorch's operators run on the stream."""
_free: defaultdict[_Kind, dict[int, int]] = defaultdict(dict)
"""Streams of each kind that are not in use, with the thread that used each last. None is ever destroyed: PyTorch's
allocator goes on asking what memory a stream has used."""
_created: Counter[_Kind] = Counter()


class _Own(torch.cuda.ExternalStream):
    """A stream that is free again when this object is deleted. Weak references cannot tell: PyTorch deletes streams
    without clearing them."""

    user, computes = 0, False

    def __del__(self, free: Mapping[_Kind, dict[int, int]] = _free) -> None:
        free[self.device_index, self.computes][self.cuda_stream] = self.user


def dedicated_stream(device: torch.device | int, *, computes: bool = False) -> torch.cuda.Stream:
    """Return a stream of a GPU that nothing else uses while the returned object is alive.

    Where PyTorch `computes` on it, a thread gets a stream that it had before, if one is free: cuBLAS keeps a workspace
    (32 MiB on Hopper) for every pair of a thread and a stream.
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
    stream = _Own(_made(index) if handle is None else handle, device=torch.device("cuda", index))
    stream.user, stream.computes = thread, computes
    return stream


def _index(device: torch.device | int) -> int:
    index = device if isinstance(device, int) else device.index
    return torch.cuda.current_device() if index is None else index


def _made(index: int) -> int:
    from cuda.bindings import driver

    torch.cuda.init()
    with torch.cuda.device(index):
        make_context_current(index)  # a new thread has none, and PyTorch sees nothing to change
        flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return int(check(driver.cuStreamCreate(flags), "making a stream"))
