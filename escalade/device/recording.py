"""CUDA graph capture through PyTorch, one at a time and without garbage collection."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from escalade.gc_pause import gc_paused

# PyTorch synchronizes the device before it captures, which would invalidate a capture in another thread.
_capture_lock = threading.RLock()


@contextmanager
def capture_into(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None = None, errors: str = "global"
) -> Iterator[None]:
    """Capture the enqueued work into `graph`; `errors` is PyTorch's `capture_error_mode`.

    The garbage collector is paused: freeing an older graph would invalidate the capture.
    """
    with _capture_lock, gc_paused():
        before = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, stream=stream, capture_error_mode=errors):
                yield
        finally:
            if torch.cuda.current_stream() != before:
                _leave_invalid_capture(before)


def _leave_invalid_capture(stream: torch.cuda.Stream) -> None:
    """Undo what PyTorch leaves behind when a capture becomes invalid, as by an operator that waits for the GPU.

    The stream of the capture stays current, and the generator of random numbers waits for the end of the capture.
    """
    torch.cuda.set_stream(stream)
    generator = torch.cuda.default_generators[stream.device_index]
    generator.graphsafe_set_state(generator.clone_state())
