"""Memory of the GPU that comes from CUDA itself, past PyTorch's allocator."""

from __future__ import annotations

import torch

from escalade.device.driver import check


def allocate(device: torch.device, size: int) -> int:
    """The address of so many bytes, by a call of CUDA's."""
    from cuda.bindings import driver

    with torch.cuda.device(device):
        return int(check(driver.cuMemAlloc(max(size, 1)), f"allocating {size} bytes"))


def release(address: int) -> None:
    """Gives memory back; CUDA waits for all that runs on the device first."""
    from cuda.bindings import driver

    check(driver.cuMemFree(address), "giving memory back")
