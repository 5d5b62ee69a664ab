"""Launches by a driver that only records its calls."""

from __future__ import annotations

import ctypes
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from cuda.bindings import driver

from escalade.device import cuda
from escalade.device.driver import function_at
from escalade.errors import LaunchError

NO_CONTEXT = int(driver.CUresult.CUDA_ERROR_INVALID_CONTEXT)


class Recorder:
    """`cuLaunchKernelEx`, and the context of the calling thread."""

    def __init__(self) -> None:
        self.streams: list[int] = []
        self.has_context = False
        self.status = 0

    def __call__(self, config: Any) -> int:
        if not self.has_context:
            return NO_CONTEXT
        self.streams.append(config.hStream)
        return self.status


def test_a_thread_without_a_context_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    made: list[int] = []

    def make(device_index: int) -> None:
        made.append(device_index)
        recorder.has_context = True

    monkeypatch.setattr("escalade.device.driver.make_context_current", make)
    launch = cuda.CudaLaunch.__new__(cuda.CudaLaunch)
    stream = 0
    config = SimpleNamespace(hStream=0)
    vars(launch).update(
        _launch=partial(recorder, config), _lane=0, _stream=0,
        device_index=1, _config=config, what="launching", _current_device=lambda: 1,
        _current_stream=lambda index: stream,
    )  # fmt: skip
    launch()
    stream = 77
    launch()
    launch()
    assert made == [1] and recorder.streams == [0, 77, 77]
    monkeypatch.setattr(driver, "cuGetErrorName", lambda status: (0, status.name.encode()))
    monkeypatch.setattr(driver, "cuGetErrorString", lambda status: (0, b"it failed"))
    recorder.status = int(driver.CUresult.CUDA_ERROR_LAUNCH_FAILED)
    with pytest.raises(LaunchError, match="launching: CUDA_ERROR_LAUNCH_FAILED: it failed"):
        launch()


def test_a_function_of_c_takes_whole_addresses() -> None:
    compare = function_at(ctypes.cast(ctypes.CDLL(None).memcmp, ctypes.c_void_p).value or 0)
    rooms = [ctypes.create_string_buffer(text, 8) for text in (b"seven", b"seven", b"eight")]
    one, same, other = (ctypes.c_void_p(ctypes.addressof(room)) for room in rooms)
    assert compare(one, same, ctypes.c_void_p(8)) == 0
    assert compare(one, other, ctypes.c_void_p(8)) > 0 > compare(other, one, ctypes.c_void_p(8))
