"""What a GPU is like while it works, by the driver's management library (NVML): clocks, power, temperature, throttling.

A card that is too hot or draws too much power lowers its clock, and figures taken then are not what it can do.
"""

from __future__ import annotations

import ctypes
import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

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
"""Reasons for a lower clock that are not somebody's wish, by their bits (`nvmlClocksEventReasons`)."""
SECONDS_BETWEEN = 0.05
_PCIE_OUT, _PCIE_IN = 0, 1
"""`NVML_PCIE_UTIL_TX_BYTES` and `NVML_PCIE_UTIL_RX_BYTES`, as the card sees them."""


class _Utilization(ctypes.Structure):
    """`nvmlUtilization_t`."""

    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


@dataclass(frozen=True)
class GpuState:
    """A card at one moment; None stands for what its driver does not say."""

    sm_mhz: int | None
    memory_mhz: int | None
    power_w: float | None
    temperature_c: int | None
    reasons: int = 0
    """Bits of why the clock is lower than the highest."""


@dataclass(frozen=True)
class GpuConditions:
    """A card over a measurement."""

    sm_mhz: float | None
    """The median of the multiprocessors' clock."""
    memory_mhz: float | None
    power_w: float | None
    """The most power."""
    temperature_c: float | None
    """The highest temperature."""
    throttled: str
    """Why the clock was held down at some time, or nothing."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def summarize_states(states: Sequence[GpuState]) -> GpuConditions | None:
    """What was seen over a measurement; None where nothing was."""
    if not states:
        return None

    def known(name: str) -> list[float]:
        return [value for state in states if (value := getattr(state, name)) is not None]

    def median(name: str) -> float | None:
        return statistics.median(found) if (found := known(name)) else None

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
    """Looks at the current GPU now and then; at none where there is none, or no library to ask."""

    def __init__(self) -> None:
        self._card = _card(torch.cuda.current_device()) if torch.cuda.is_initialized() else None
        self._states: list[GpuState] = []
        self._last = -SECONDS_BETWEEN

    def sample(self) -> None:
        """Takes the state down, unless it was taken a moment ago."""
        now = time.monotonic()
        if self._card is not None and now - self._last >= SECONDS_BETWEEN:
            self._last = now
            self._states.append(self._card.state())

    @property
    def conditions(self) -> GpuConditions | None:
        return summarize_states(self._states)

    @property
    def record(self) -> dict[str, Any]:
        """The conditions as records have them."""
        return asdict(self.conditions) if self.conditions else {}


@dataclass(frozen=True)
class GpuLoad:
    """Medians over a stretch of work; None stands for what the driver does not report."""

    gpu_pct: float | None
    """Share of the time in which a kernel ran."""
    pcie_in_mbps: float | None
    """MB/s from the host to the card."""
    pcie_out_mbps: float | None


class LoadMonitor:
    """Samples utilization and PCIe traffic in a thread of its own, while the block runs.

    Each reading of the traffic takes the driver 20 ms, so none of this belongs beside what is timed.
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
            return statistics.median(known) if known else None

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
    """One GPU as the library knows it."""

    def __init__(self, library: Any, handle: ctypes.c_void_p) -> None:
        self._library = library
        self._handle = handle

    def state(self) -> GpuState:
        """What it is like now."""
        power = self._asked("nvmlDeviceGetPowerUsage")
        return GpuState(
            self._asked("nvmlDeviceGetClockInfo", _SM_CLOCK),
            self._asked("nvmlDeviceGetClockInfo", _MEMORY_CLOCK),
            None if power is None else power / 1e3,
            self._asked("nvmlDeviceGetTemperature", _GPU_TEMPERATURE),
            self._asked("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong) or 0,
        )

    def load(self) -> tuple[int | None, int | None, int | None]:
        """Return utilization in percent, and KB/s in and out over PCIe."""
        rates = _Utilization()
        try:
            failed = self._library.nvmlDeviceGetUtilizationRates(self._handle, ctypes.byref(rates))
        except AttributeError:  # of another version
            failed = 1
        return (
            None if failed else int(rates.gpu),
            self._asked("nvmlDeviceGetPcieThroughput", _PCIE_IN),
            self._asked("nvmlDeviceGetPcieThroughput", _PCIE_OUT),
        )

    def _asked(self, function: str, *which: int, kind: type[Any] = ctypes.c_uint) -> int | None:
        value = kind()
        try:
            failed = getattr(self._library, function)(self._handle, *which, ctypes.byref(value))
        except AttributeError:  # of another version
            return None
        return None if failed else int(value.value)


@cache
def _card(index: int) -> Nvml | None:
    """A device of PyTorch's, found by its place on the bus: the library counts those that this process may not use."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError:
        return None
    handle, place = ctypes.c_void_p(), pci_bus_id(index).encode()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByPciBusId_v2(place, ctypes.byref(handle)):
        return None
    return Nvml(library, handle)
