"""Work on a stream recorded as a CUDA graph."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from escalade.gc_pause import gc_paused

_one_at_a_time = threading.RLock()
"""PyTorch waits for the device before it records, which is a mistake in whatever another thread is recording."""


@contextmanager
def capture_into(
    graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream | None = None, errors: str = "global"
) -> Iterator[None]:
    """What is enqueued meanwhile becomes the graph; `errors` says whose mistakes end the recording, as PyTorch has it.

    Python's collector rests: an older graph that it came to free would count as such a mistake.
    """
    with (
        _one_at_a_time,
        gc_paused(),
        torch.cuda.graph(graph, stream=stream, capture_error_mode=errors),
    ):
        yield
