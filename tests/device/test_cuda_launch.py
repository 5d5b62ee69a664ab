"""Launches by a driver that only writes down what it is asked for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from cuda.bindings import driver

from escalade.device import cuda

SUCCESS, NO_CONTEXT = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_INVALID_CONTEXT


class Recorder:
    """`cuLaunchKernelEx`, and the context of the thread that calls it."""

    def __init__(self) -> None:
        self.streams: list[int] = []
        self.has_context = False

    def __call__(self, config: Any, *_: Any) -> tuple[Any]:
        if not self.has_context:
            return (NO_CONTEXT,)
        self.streams.append(config.hStream)
        return (SUCCESS,)


def test_a_thread_without_a_context_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    made: list[int] = []

    def make(device_index: int) -> None:
        made.append(device_index)
        recorder.has_context = True

    monkeypatch.setattr(cuda, "make_context_current", make)
    launch = cuda.CudaLaunch.__new__(cuda.CudaLaunch)
    stream = 0
    vars(launch).update(
        _launch=recorder, _success=SUCCESS, _no_context=NO_CONTEXT, _handle=None, _address=0, _lane=0, _stream=0,
        device_index=1, _config=SimpleNamespace(hStream=0), what="launching", _current_device=lambda: 1,
        _current_stream=lambda index: stream,
    )  # fmt: skip
    launch()
    stream = 77
    launch()
    launch()
    assert made == [1] and recorder.streams == [0, 77, 77]
