"""GPU memory allocated by the driver, bypassing PyTorch's caching allocator."""

from __future__ import annotations

import torch

from escalade.device.driver import check


def allocate(device: torch.device, size: int) -> int:
    """Allocate `size` bytes; returns the address."""
    from cuda.bindings import driver

    with torch.cuda.device(device):
        return int(check(driver.cuMemAlloc(max(size, 1)), f"allocating {size} bytes"))


def release(address: int) -> None:
    """Free memory. CUDA first waits for all work on the device."""
    from cuda.bindings import driver

    check(driver.cuMemFree(address), "freeing memory")
