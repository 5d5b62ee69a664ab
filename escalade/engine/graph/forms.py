"""Storage formats of values: element type, layout and pitch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from escalade.device.strides import layout_of
from escalade.device.torch_private import FAST_PATHS
from escalade.errors import UnsupportedError
from escalade.ops.base import dtypes

STORAGE = {
    **{name: dtypes.STORAGE[name] for name in dtypes.MULTIPLIED},
    **dict.fromkeys(dtypes.QUANTIZED, torch.float16),
}
"""Storage type of values by dtype of the plan; in fp8 and int8, values between two convolutions have one byte."""
TENSOR_CORE_DTYPES = ("tf32", "fp16", "bf16", *dtypes.QUANTIZED)
NAMES = {**dtypes.NAMES, torch.uint8: "uint8"}
_META_BYTES = 2**40  # size of a meta buffer that holds any value, whatever its pitch


def unquantized(dtype: str) -> str:
    """Return the dtype of everything that a plan of this dtype does not quantize."""
    return "fp16" if dtype in dtypes.QUANTIZED else dtype


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if every element has an address given by the strides: not sparse, nested or memoryless zeros."""
    return tensor.layout is torch.strided and not tensor.is_nested and not FAST_PATHS.is_zero_tensor(tensor)


def require_dense(tensors: Iterable[torch.Tensor], passed: str, supported: str) -> None:
    """Raise for tensors without strides; `passed` names the tensors, and `supported` says what to pass instead."""
    for tensor in tensors:
        if not is_dense(tensor):
            raise UnsupportedError(f"{passed} {describe_tensor(tensor)}; {supported}")


def is_finite(tensor: torch.Tensor) -> bool:
    """Return True if all elements are finite."""
    # A finite sum implies it in a single pass; finite elements may still overflow the sum.
    return math.isfinite(tensor.detach().sum()) or bool(torch.isfinite(tensor).all())


def describe_tensor(tensor: torch.Tensor) -> str:
    """Describe a tensor that is not a dense one of real numbers."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"a tensor in layout {str(tensor.layout).removeprefix('torch.')}"
    return "zeros without memory" if FAST_PATHS.is_zero_tensor(tensor) else f"a tensor of {tensor.dtype}"


@dataclass(frozen=True)
class Form:
    """A value's shape, element type and layout: `nhwc`, `nchw`, or `flat` for non-images.

    A row is the innermost dimension: a pixel's channels in `nhwc`. Rows of a value that is part of a larger one are
    `pitch` elements apart; 0 means dense.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    pitch: int = 0

    @property
    def order(self) -> tuple[int, ...]:
        """Dimensions in memory order, innermost last."""
        return (0, 2, 3, 1) if self.layout == "nhwc" else tuple(range(len(self.shape)))

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def row(self) -> int:
        """Elements of a row."""
        return self.shape[self.order[-1]] if self.shape else 1

    @property
    def rows(self) -> int:
        return self.elements // max(self.row, 1)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize

    def meta_tensor(self) -> torch.Tensor:
        """Return a meta tensor with the strides of this form."""
        return self.view(torch.empty(_META_BYTES, dtype=torch.uint8, device="meta"), 0)

    def view(self, memory: torch.Tensor, offset: int) -> torch.Tensor:
        """Return a view of these bytes as a tensor with PyTorch's order of dimensions."""
        pitch = self.pitch or self.row
        span = ((self.rows - 1) * pitch + self.row) * self.dtype.itemsize if self.elements else 0
        flat = memory[offset : offset + span].view(self.dtype)
        strides = dict.fromkeys(range(len(self.shape)), 1)
        step = pitch
        for dimension in reversed(self.order[:-1]):
            strides[dimension] = step
            step *= max(self.shape[dimension], 1)
        return flat.as_strided(self.shape, tuple(strides.values()))


@dataclass(frozen=True)
class InputFormat:
    """Element type and layout of a caller's tensor."""

    dtype: torch.dtype
    layout: str

    @staticmethod
    def of(tensor: torch.Tensor) -> InputFormat:
        return InputFormat(tensor.dtype, layout_of(tensor))


def require_dtype(dtype: str | torch.dtype) -> str:
    """Return the name of a plan's dtype, given as such a name or as a PyTorch dtype."""
    names = {**dtypes.NAMES, **{dtypes.STORAGE[name]: name for name in dtypes.QUANTIZED}}
    name = names.get(dtype) if isinstance(dtype, torch.dtype) else dtype
    if not isinstance(name, str) or name not in STORAGE:
        shown = str(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
        own = ", ".join(map(str, names))
        raise UnsupportedError(f"dtype {shown}: compile takes {', '.join(STORAGE)}, or PyTorch's {own}")
    return name
