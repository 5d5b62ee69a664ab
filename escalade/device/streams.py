"""Streams that nobody else has.

PyTorch's streams come from a pool of 32, which everybody is given in turn: who records a CUDA graph on one of them
records what another thread, which was given the same, does meanwhile, and who enqueues work on one may do so in the
midst of what a caller is recording.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from escalade.device.driver import check, make_context_current

_free: defaultdict[int, list[int]] = defaultdict(list)
"""The streams of each device that are not in use. None is ever destroyed: PyTorch's allocator goes on asking what
memory a stream has used."""


class _Own(torch.cuda.ExternalStream):
    """A stream that is free again when this object goes. Nothing else can tell: PyTorch lets go of streams without a
    word to weak references, which point into nowhere then."""

    def __del__(self, free: Mapping[int, list[int]] = _free) -> None:
        free[self.device_index].append(self.cuda_stream)


def own_stream(device: torch.device | int) -> torch.cuda.Stream:
    """A stream of a GPU that nobody else has while this object of it lives."""
    index = _index(device)
    try:
        handle = _free[index].pop()
    except IndexError:
        handle = _made(index)
    return _Own(handle, device=torch.device("cuda", index))


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
