"""Properties of a GPU, queried from the driver."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from escalade.device.cuda import architecture, index_of
from escalade.device.driver import check
from escalade.errors import UnsupportedError

_BUS_ID_CHARACTERS = 32


@dataclass(frozen=True)
class GpuProperties:
    """Properties of a GPU, as its driver reports them."""

    name: str
    architecture: str
    """Compilation target, such as sm_90a."""
    multiprocessors: int
    l2_bytes: int
    shared_bytes: int
    """Maximum shared memory per CTA."""
    multiprocessor_shared_bytes: int
    """Shared memory per SM."""
    registers: int
    """Registers per SM."""
    memory_bytes: int
    clock_mhz: float
    """Maximum SM clock."""
    memory_bytes_per_us: float
    """Peak DRAM bandwidth: memory clock times bus width times two transfers per clock."""


def properties_of(device: torch.device) -> GpuProperties:
    """Query the driver."""
    if device.type != "cuda":
        raise UnsupportedError(f"device {device}: only CUDA devices have GPU properties")
    from cuda.bindings import driver

    index = index_of(device)
    properties = torch.cuda.get_device_properties(index)
    handle = check(driver.cuDeviceGet(index), "finding the device")

    def attribute(name: str) -> int:
        wanted = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(
            check(driver.cuDeviceGetAttribute(wanted, handle), f"querying {name} of {properties.name}")
        )

    bus_bytes = attribute("GLOBAL_MEMORY_BUS_WIDTH") / 8
    return GpuProperties(
        properties.name,
        architecture(index),
        attribute("MULTIPROCESSOR_COUNT"),
        attribute("L2_CACHE_SIZE"),
        attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        attribute("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
        attribute("MAX_REGISTERS_PER_MULTIPROCESSOR"),
        properties.total_memory,
        attribute("CLOCK_RATE") / 1e3,
        2 * attribute("MEMORY_CLOCK_RATE") / 1e3 * bus_bytes,
    )


def pci_bus_id(index: int) -> str:
    """Return the PCI bus id of a device, by which other libraries identify it."""
    from cuda.bindings import driver

    handle = check(driver.cuDeviceGet(index), "finding the device")
    bus_id = check(driver.cuDeviceGetPCIBusId(_BUS_ID_CHARACTERS, handle), "querying the PCI bus id")
    return bytes(bus_id).split(b"\0")[0].decode()
