"""Staging buffers for batches between host and device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch

from escalade.device.strides import is_packed, layout_of

_ALIGNMENT = 256  # bytes; that of cudaMalloc, for full copy speed


class StagingBuffer:
    """One allocation for all tensors of a batch, reused by the next batch; it grows to the largest.

    The caller must ensure that no copy of the previous batch is still in flight.
    """

    def __init__(self, device: torch.device, pinned: bool = False) -> None:
        self._device = device
        self._pinned = pinned
        self._memory = self._allocate(0)

    @property
    def bytes(self) -> int:
        return self._memory.numel()

    def like(
        self, tensors: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype] | None = None
    ) -> list[torch.Tensor]:
        """Return uninitialized dense tensors of these shapes and layouts."""
        dtypes = dtypes or [tensor.dtype for tensor in tensors]
        sizes = [tensor.numel() * dtype.itemsize for tensor, dtype in zip(tensors, dtypes, strict=True)]
        offsets = list(itertools.accumulate((_aligned(size) for size in sizes), initial=0))
        if offsets[-1] > self.bytes:
            self._memory = self._allocate(0)  # free the old buffer before allocating the new one
            self._memory = self._allocate(offsets[-1])
        return [
            _view(self._memory[offset : offset + size].view(dtype), tensor)
            for offset, size, dtype, tensor in zip(offsets, sizes, dtypes, tensors, strict=False)
        ]

    def _allocate(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device=self._device, pin_memory=self._pinned and size > 0)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if the tensor has the same memory layout as its copy from `StagingBuffer.like`."""
    return is_packed(tensor, layout_of(tensor))


def _view(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    if layout_of(like) == "nhwc":
        n, c, h, w = like.shape
        return flat.view(n, h, w, c).permute(0, 3, 1, 2)
    return flat.view(like.shape)


def _aligned(size: int) -> int:
    return math.ceil(size / _ALIGNMENT) * _ALIGNMENT
