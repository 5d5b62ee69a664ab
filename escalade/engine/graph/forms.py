"""How values lie in memory: element type and layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base import dtypes

STORAGE = {**{name: dtypes.STORAGE[name] for name in dtypes.MULTIPLIED}, "fp8": torch.float16}
"""What a plan of each dtype keeps its values in; in fp8 those between two convolutions are e4m3."""
TENSOR_CORE_DTYPES = ("tf32", "fp16", "bf16", "fp8")
"""The dtypes whose products tensor cores do."""
NAMES = {**dtypes.NAMES, torch.uint8: "uint8"}


@dataclass(frozen=True)
class Form:
    """A value's sizes, element type and layout: `nhwc`, `nchw`, or `flat` for what is not an image."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, memory: torch.Tensor, offset: int) -> torch.Tensor:
        """The value in these bytes, with PyTorch's order of dimensions."""
        flat = memory[offset : offset + self.bytes].view(self.dtype)
        if self.layout == "nhwc":
            n, c, h, w = self.shape
            return flat.view(n, h, w, c).permute(0, 3, 1, 2)
        return flat.view(self.shape)


@dataclass(frozen=True)
class InputFormat:
    """How the caller's tensor comes: its element type, and its layout if it is an image."""

    dtype: torch.dtype
    layout: str

    @staticmethod
    def of(tensor: torch.Tensor) -> InputFormat:
        if tensor.dim() != 4:
            return InputFormat(tensor.dtype, "flat")
        channels_last = not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
        return InputFormat(tensor.dtype, "nhwc" if channels_last else "nchw")


def require_dtype(dtype: str) -> None:
    if dtype not in STORAGE:
        raise UnsupportedError(f"dtype {dtype!r}: compile takes {', '.join(STORAGE)}")
