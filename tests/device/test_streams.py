"""Streams with a single user, reused one after another."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from escalade.device import streams
from escalade.device.streams import dedicated_stream
from tests.fake_cuda import Gpu

CUDA = torch.device("cuda", 0)
_let_go = streams._DedicatedStream.__del__


def test_a_stream_has_a_single_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Released streams are reused: a service that makes plans for days needs only a few."""
    gpu = Gpu(0)
    gpu.stand_in(monkeypatch)
    monkeypatch.setattr(streams, "_DedicatedStream", _Handle)
    held = [dedicated_stream(CUDA) for _ in range(40)]
    assert len({stream.cuda_stream for stream in held}) == 40
    left = {held.pop().cuda_stream, held.pop().cuda_stream}
    gc.collect()
    again = [dedicated_stream(CUDA), dedicated_stream(0)]
    assert {stream.cuda_stream for stream in again} == left
    assert dedicated_stream(CUDA).cuda_stream not in {stream.cuda_stream for stream in (*held, *again)}


def test_a_thread_gets_a_stream_that_it_had_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS keeps a workspace per pair of thread and stream, so streams must not move between threads."""
    gpu = Gpu(0)
    gpu.stand_in(monkeypatch)
    monkeypatch.setattr(streams, "_DedicatedStream", _Handle)
    pairs = set[tuple[int, int]]()
    with ThreadPoolExecutor(4) as pool:
        meet = threading.Barrier(4)

        def work(_: int) -> None:
            for _ in range(8):
                meet.wait()
                stream = dedicated_stream(CUDA, computes=True)
                pairs.add((threading.get_ident(), stream.cuda_stream))
                del stream

        list(pool.map(work, range(4)))
    assert len(pairs) == len({stream for _, stream in pairs}) == 4
    assert dedicated_stream(CUDA).cuda_stream not in {stream for _, stream in pairs}
    streams._created[0, True] = streams._MOST
    assert dedicated_stream(CUDA, computes=True).cuda_stream in {
        stream for _, stream in pairs
    }  # of another thread


class _Handle:
    """Fake PyTorch stream: a real one needs CUDA."""

    user, computes = 0, False

    def __init__(self, handle: int, device: torch.device) -> None:
        self.cuda_stream, self.device_index = handle, device.index

    def __del__(self) -> None:
        _let_go(self, streams._free)  # type: ignore[arg-type]
