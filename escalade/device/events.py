"""Events that mark where a stream has come to, recorded by threads of which many wait for the interpreter's lock."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import torch

from escalade.device.driver import gil_holding_function

_NOT_YET = 600
"""What the driver says of an event whose work is not done (CUDA_ERROR_NOT_READY)."""


class StreamMarker:
    """An event. PyTorch gives the interpreter's lock away to record one, and where other threads wait for that lock,
    each time it is given away takes longer than the recording.
    """

    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        self._record: Callable[[ctypes.c_void_p], int] | None = None
        self._query: Callable[[], int] | None = None

    def record(self, stream: int, has_room: bool) -> None:
        """Marks what the current stream, as the driver has it, has been given so far. `has_room` says that the stream's
        queue is not full: then nothing is waited for, and the lock is kept."""
        if self._record is not None and has_room and not self._record(ctypes.c_void_p(stream)):
            return
        self.event.record()  # also what the driver has refused, for PyTorch says why
        if self._record is None:  # the event is made when it is first recorded
            handle = ctypes.c_void_p(self.event.cuda_event)
            self._record = partial(gil_holding_function("cuEventRecord"), handle)
            self._query = partial(gil_holding_function("cuEventQuery"), handle)

    def is_done(self) -> bool:
        """Whether the stream has done all that was marked; so it has if nothing was."""
        status = 0 if self._query is None else self._query()
        if status in (0, _NOT_YET):
            return status == 0
        return self.event.query()  # what the driver has refused, for PyTorch says why
