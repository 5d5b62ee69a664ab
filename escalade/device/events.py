"""Events that mark where a stream has come to, recorded by threads of which many wait for the interpreter's lock."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial

import torch

from escalade.device.driver import brief_function


class Mark:
    """An event. PyTorch gives the interpreter's lock away to record one, and where other threads wait for that lock,
    each time it is given away takes longer than the recording.
    """

    def __init__(self) -> None:
        self.event = torch.cuda.Event()
        self._record: Callable[[ctypes.c_void_p], int] | None = None

    def record(self, stream: torch.cuda.Stream, has_room: bool) -> None:
        """Marks what the stream, of the current device, has been given so far. `has_room` says that the stream's queue
        is not full: then nothing is waited for, and the lock is kept."""
        if self._record is not None and has_room and not self._record(ctypes.c_void_p(stream.cuda_stream)):
            return
        self.event.record(stream)  # also what the driver has refused, for PyTorch says why
        if self._record is None:  # the event is made when it is first recorded
            self._record = partial(brief_function("cuEventRecord"), ctypes.c_void_p(self.event.cuda_event))
