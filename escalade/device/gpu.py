"""What the driver says of a GPU: the one place that asks it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from escalade.device.cuda import architecture
from escalade.device.driver import check
from escalade.errors import UnsupportedError

_PLACE_CHARACTERS = 32


@dataclass(frozen=True)
class GpuProperties:
    """Properties of a GPU, as its driver reports them."""

    name: str
    architecture: str
    """What kernels are compiled for."""
    multiprocessors: int
    l2_bytes: int
    shared_bytes: int
    """The most shared memory that one block may ask for."""
    multiprocessor_shared_bytes: int
    """The shared memory that the blocks of a multiprocessor have together."""
    registers: int
    """Registers of a multiprocessor."""
    memory_bytes: int
    clock_mhz: float
    """The highest clock."""
    memory_bytes_per_us: float
    """What the memory's clock and the width of its bus come to: two transfers a clock."""


def properties_of(device: torch.device) -> GpuProperties:
    """Asks the driver."""
    if device.type != "cuda":
        raise UnsupportedError(f"properties are a GPU's; {device} is none")
    from cuda.bindings import driver

    index = device.index if device.index is not None else torch.cuda.current_device()
    asked = torch.cuda.get_device_properties(index)
    handle = check(driver.cuDeviceGet(index), "finding the device")

    def attribute(name: str) -> int:
        wanted = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(driver.cuDeviceGetAttribute(wanted, handle), f"asking {asked.name} for {name}"))

    bus_bytes = attribute("GLOBAL_MEMORY_BUS_WIDTH") / 8
    return GpuProperties(
        asked.name,
        architecture(index),
        attribute("MULTIPROCESSOR_COUNT"),
        attribute("L2_CACHE_SIZE"),
        attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        attribute("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        asked.total_memory,
        attribute("CLOCK_RATE") / 1e3,
        2 * attribute("MEMORY_CLOCK_RATE") / 1e3 * bus_bytes,
    )


def pci_bus_id(index: int) -> str:
    """Where on the bus a device of this process lies: what other libraries know it by."""
    from cuda.bindings import driver

    handle = check(driver.cuDeviceGet(index), "finding the device")
    place = check(driver.cuDeviceGetPCIBusId(_PLACE_CHARACTERS, handle), "asking for its place on the bus")
    return bytes(place).split(b"\0")[0].decode()
