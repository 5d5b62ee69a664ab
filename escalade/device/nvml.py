"""Clocks, power, temperature, throttling and load of a GPU during measurements, by NVML.

A card that is too hot or reaches its power limit lowers its clock, which makes measurements taken then too slow.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from escalade.device.gpu import pci_bus_id

_LIBRARY = "libnvidia-ml.so.1"
_SM_CLOCK, _MEMORY_CLOCK, _GPU_TEMPERATURE = 1, 2, 0
"""`NVML_CLOCK_SM`, `NVML_CLOCK_MEM` and `NVML_TEMPERATURE_GPU`."""
THROTTLED = {
    0x04: "the power limit",
    0x08: "a slowdown by hardware",
    0x20: "heat",
    0x40: "heat, by hardware",
    0x80: "the power supply",
}
"""Involuntary reasons for a lower clock, by their bits (`nvmlClocksEventReasons`)."""
SECONDS_BETWEEN = 0.05
_PCIE_OUT, _PCIE_IN = 0, 1
"""`NVML_PCIE_UTIL_TX_BYTES` and `NVML_PCIE_UTIL_RX_BYTES`: directions as seen by the card."""


class _Utilization(ctypes.Structure):
    """`nvmlUtilization_t`."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@dataclass(frozen=True)
class GpuState:
    """One sample; None for what the driver does not report."""

    sm_mhz: int | None
    memory_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    reasons: int = 0
    """Bits of the reasons for a clock below the maximum."""


@dataclass(frozen=True)
class GpuConditions:
    """Summary of the samples of a measurement."""

    sm_mhz: float | None
    """Median SM clock."""
    memory_mhz: float | None
    """Median memory clock."""
    power_w: float | None
    """Maximum power."""
    temperature_c: float | None
    """Maximum temperature."""
    throttled: str
    """Reasons for throttling at any time; empty if there was none."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize_states(states: Sequence[GpuState]) -> GpuConditions | None:
    """Summarize the samples of a measurement; None without samples."""
    if not states:
        return None

    def known(name: str) -> list[float]:
        return [value for state in states if (value := getattr(state, name)) is not None]

    def median(name: str) -> float | None:
        return float(np.median(found)) if (found := known(name)) else None

    seen = 0
    for state in states:
        seen |= state.reasons
    return GpuConditions(
        median("sm_mhz"),
        median("memory_mhz"),
        max(known("power_w"), default=None),
        max(known("temperature_c"), default=None),
        ", ".join(why for bit, why in THROTTLED.items() if seen & bit),
    )


class ConditionMonitor:
    """Samples the state of the current GPU. Does nothing without a GPU or NVML."""

    def __init__(self) -> None:
        self._card = _card(torch.cuda.current_device()) if torch.cuda.is_initialized() else None
        self._states: list[GpuState] = []
        self._last = -SECONDS_BETWEEN

    def sample(self) -> None:
        """Take a sample, at most every `SECONDS_BETWEEN` seconds."""
        now = time.monotonic()
        if self._card is not None and now - self._last >= SECONDS_BETWEEN:
            self._last = now
            self._states.append(self._card.state())

    @property
    def conditions(self) -> GpuConditions | None:
        return summarize_states(self._states)

    @property
    def record(self) -> dict[str, Any]:
        """Conditions in the form of result records."""
        return asdict(self.conditions) if self.conditions else {}


@dataclass(frozen=True)
class GpuLoad:
    """Median load over a stretch of work; None for what the driver does not report."""

    gpu_pct: float | None
    """Share of the time in which a kernel ran."""
    pcie_in_mbps: float | None
    """MB/s from the host to the card."""
    pcie_out_mbps: float | None


class LoadMonitor:
    """Context manager that samples utilization and PCIe traffic in a background thread.

    Each reading of the traffic takes the driver 20 ms: do not use it while timing.
    """

    def __init__(self) -> None:
        self._card = _card(torch.cuda.current_device()) if torch.cuda.is_initialized() else None
        self._samples: list[tuple[int | None, int | None, int | None]] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> LoadMonitor:
        if self._card is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        if self._card is not None:
            self._thread.join()

    @property
    def load(self) -> GpuLoad:
        def median(place: int) -> float | None:
            known = [value for sample in self._samples if (value := sample[place]) is not None]
            return float(np.median(known)) if known else None

        incoming, outgoing = median(1), median(2)
        return GpuLoad(
            median(0),
            None if incoming is None else incoming / 1e3,
            None if outgoing is None else outgoing / 1e3,
        )

    def _sample(self) -> None:
        assert self._card is not None
        while not self._done.is_set():
            self._samples.append(self._card.load())


class Nvml:
    """NVML handle of one GPU."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    def state(self) -> GpuState:
        power = self._query("nvmlDeviceGetPowerUsage")
        return GpuState(
            self._query("nvmlDeviceGetClockInfo", _SM_CLOCK),
            self._query("nvmlDeviceGetClockInfo", _MEMORY_CLOCK),
            None if power is None else power / 1e3,
            self._query("nvmlDeviceGetTemperature", _GPU_TEMPERATURE),
            self._query("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong) or 0,
        )

    def load(self) -> tuple[int | None, int | None, int | None]:
        """Return utilization in percent, and KB/s in and out over PCIe."""
        rates = _Utilization()
        try:
            failed = self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(rates))
        except AttributeError:  # not in this version of the library
            failed = 1
        return (
            None if failed else int(rates.gpu),
            self._query("nvmlDeviceGetPcieThroughput", _PCIE_IN),
            self._query("nvmlDeviceGetPcieThroughput", _PCIE_OUT),
        )

    def _query(self, function: str, *which: int, kind: type[Any] = ctypes.c_uint) -> int | None:
        value = kind()
        try:
            failed = getattr(self._library, function)(self._handle, *which, ctypes.byref(value))
        except AttributeError:  # not in this version of the library
            return None
        return None if failed else int(value.value)


@cache
def _card(index: int) -> Nvml | None:
    """Find a PyTorch device by its PCI bus id: NVML's indices include devices hidden by CUDA_VISIBLE_DEVICES."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    handle, bus_id = ctypes.c_void_p(), pci_bus_id(index).encode()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByPciBusId_v2(bus_id, ctypes.byref(handle)):
        return None
    return Nvml(library, handle)
