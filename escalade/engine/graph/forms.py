"""How values lie in memory: element type and layout."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from escalade.device.strides import layout_of
from escalade.device.torch_private import FAST_PATHS
from escalade.errors import UnsupportedError
from escalade.ops.base import dtypes

STORAGE = {**{name: dtypes.STORAGE[name] for name in dtypes.MULTIPLIED}, "fp8": torch.float16}
"""What a plan of each dtype keeps its values in; in fp8 those between two convolutions are e4m3."""
TENSOR_CORE_DTYPES = ("tf32", "fp16", "bf16", "fp8")
"""The dtypes whose products tensor cores do."""
NAMES = {**dtypes.NAMES, torch.uint8: "uint8"}
_ROOM = 2**40
"""Bytes without contents, enough for any value with its rows apart."""


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if every element has an address that the strides give: not sparse, nested or zeros without memory."""
    return tensor.layout is torch.strided and not tensor.is_nested and not FAST_PATHS.is_zero_tensor(tensor)


def require_dense(tensors: Iterable[torch.Tensor], passed: str, taken: str) -> None:
    """Refuse tensors without strides; `passed` says which tensors these are, `taken` what is supported."""
    for tensor in tensors:
        if not is_dense(tensor):
            raise UnsupportedError(f"{passed} {kind_of(tensor)}; {taken}")


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all of its elements are: they are if their sum is, which takes one pass; finite ones may overflow it."""
    return math.isfinite(tensor.detach().sum()) or bool(torch.isfinite(tensor).all())


def kind_of(tensor: torch.Tensor) -> str:
    """What a tensor is, for those that are no dense ones of real numbers."""
    if tensor.is_nested:
        return "a nested tensor"
    if tensor.layout is not torch.strided:
        return f"a tensor in layout {str(tensor.layout).removeprefix('torch.')}"
    return "zeros without memory" if FAST_PATHS.is_zero_tensor(tensor) else f"a tensor of {tensor.dtype}"


@dataclass(frozen=True)
class Form:
    """A value's sizes, element type and layout: `nhwc`, `nchw`, or `flat` for what is not an image.

    A row is what lies innermost: a pixel's channels in `nhwc`. A value that is a part of a larger one has its rows
    `pitch` elements apart; 0: it is dense.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    pitch: int = 0

    @property
    def order(self) -> tuple[int, ...]:
        """The dimensions as they lie in memory, the innermost last."""
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

    def hollow(self) -> torch.Tensor:
        """A tensor without contents that lies in memory of its own as a value of this form does."""
        return self.view(torch.empty(_ROOM, dtype=torch.uint8, device="meta"), 0)

    def view(self, memory: torch.Tensor, offset: int) -> torch.Tensor:
        """The value in these bytes, with PyTorch's order of dimensions."""
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
    """How the caller's tensor comes: its element type, and its layout if it is an image."""

    dtype: torch.dtype
    layout: str

    @staticmethod
    def of(tensor: torch.Tensor) -> InputFormat:
        return InputFormat(tensor.dtype, layout_of(tensor))


def require_dtype(dtype: str | torch.dtype) -> str:
    """The name of a dtype that plans have, which PyTorch's own may stand for."""
    names = {**dtypes.NAMES, dtypes.E4M3: "fp8"}
    name = names.get(dtype) if isinstance(dtype, torch.dtype) else dtype
    if not isinstance(name, str) or name not in STORAGE:
        given = str(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
        own = ", ".join(map(str, names))
        raise UnsupportedError(f"dtype {given}: compile takes {', '.join(STORAGE)}, or PyTorch's own: {own}")
    return name
