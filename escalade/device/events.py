"""CUDA events that are cheap to record and query while many threads compete for the GIL."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import torch

from escalade.device.driver import gil_holding_function

_NOT_READY = 600  # CUDA_ERROR_NOT_READY


class StreamMarker:
    """Event recorded without releasing the GIL, which PyTorch's `Event.record` does.

    With other threads waiting for the GIL, reacquiring it takes longer than recording.
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
