"""A card's state as NVML reports it, and our conclusions."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest

from escalade.device import nvml
from escalade.device.nvml import (
    ConditionMonitor,
    GpuConditions,
    GpuLoad,
    GpuState,
    LoadMonitor,
    Nvml,
    summarize_states,
)


class Library:
    """NVML's functions; one fails, like those that a card does not support."""

    def nvmlDeviceGetClockInfo(self, handle: object, which: int, value: Any) -> int:
        value._obj.value = {1: 1980, 2: 3201}[which]
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: object, value: Any) -> int:
        value._obj.value = 512_300
        return 0

    def nvmlDeviceGetTemperature(self, handle: object, which: int, value: Any) -> int:
        return 3

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: object, value: Any) -> int:
        assert isinstance(value._obj, ctypes.c_ulonglong)
        value._obj.value = 0x24
        return 0

    def nvmlDeviceGetUtilizationRates(self, handle: object, rates: Any) -> int:
        rates._obj.gpu, rates._obj.memory = 87, 40
        return 0

    def nvmlDeviceGetPcieThroughput(self, handle: object, which: int, value: Any) -> int:
        value._obj.value = {0: 1_500, 1: 24_000_000}[which]
        return 0


def test_a_state_is_in_usual_units_and_has_gaps() -> None:
    assert Nvml(Library(), ctypes.c_void_p()).state() == GpuState(1980, 3201, 512.3, None, 0x24)
    assert Nvml(object(), ctypes.c_void_p()).state() == GpuState(None, None, None, None), "of another version"


def test_throttling_is_noticed_and_a_wish_is_not() -> None:
    states = [
        GpuState(1980, 3201, 300.0, 40, 0x1),
        GpuState(1755, 3201, 699.0, 61, 0x4),
        GpuState(1800, 3201, 650.0, 60),
    ]
    assert summarize_states(states) == GpuConditions(1800, 3201, 699.0, 61, "the power limit")
    assert summarize_states([GpuState(1980, 3201, 300.0, 40, 0x1 | 0x2 | 0x10)]) == GpuConditions(
        1980, 3201, 300.0, 40, ""
    )
    assert summarize_states([]) is None


def test_a_watch_looks_now_and_then_and_at_nothing_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = ConditionMonitor()
    watch.sample()
    assert watch.conditions is None
    monkeypatch.setattr(nvml.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(nvml.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(nvml, "_card", lambda index: Nvml(Library(), ctypes.c_void_p()))
    monkeypatch.setattr(nvml.time, "monotonic", iter((0.0, 0.01, 0.02, 0.2)).__next__)
    watch = ConditionMonitor()
    for _ in range(4):
        watch.sample()
    assert len(watch._states) == 2 and watch.conditions is not None
    assert watch.conditions.as_dict()["throttled"] == "the power limit, heat"


def test_utilization_and_traffic_are_sampled_while_a_block_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with LoadMonitor() as nothing:
        pass
    assert nothing.load == GpuLoad(None, None, None)
    monkeypatch.setattr(nvml.torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(nvml.torch.cuda, "current_device", lambda: 0)
    card = Nvml(Library(), ctypes.c_void_p())
    monkeypatch.setattr(nvml, "_card", lambda index: card)
    with LoadMonitor() as watch:
        while not watch._samples:
            pass
    assert watch.load == GpuLoad(87, 24_000, 1.5)
    assert Nvml(object(), ctypes.c_void_p()).load() == (None, None, None), "of another version"
