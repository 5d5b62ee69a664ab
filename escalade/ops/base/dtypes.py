"""Element types: as they are named, as PyTorch stores them and as kernels declare them.

`tf32` is a way to multiply what is stored as fp32; `fp8` is E4M3.
"""

from __future__ import annotations

import torch

from escalade.device.sources import C_TYPES, Type
from escalade.errors import UnsupportedError

E4M3 = torch.float8_e4m3fn
E4M3_LARGEST = 448.0
"""The largest magnitude that E4M3 has."""

STORAGE = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": E4M3,
    "uint8": torch.uint8,
}
ELEMENT_BYTES = {name: storage.itemsize for name, storage in STORAGE.items()}
DTYPES = ("fp32", "fp16", "bf16")
"""What every operation takes; some take more."""
MULTIPLIED = ("fp32", "tf32", "fp16", "bf16")
"""What operations that multiply take."""
NAMES = {STORAGE[name]: name for name in DTYPES}
VECTOR_BYTES = 16
"""The widest access that a thread has."""


def element(dtype: str) -> Type:
    """The type of an element as kernels name it."""
    return Type(C_TYPES[dtype])


def dtype_of(operation: str, x: torch.Tensor) -> str:
    if x.dtype not in NAMES:
        raise UnsupportedError(f"x is {x.dtype}; {operation} takes float32, float16 and bfloat16")
    return NAMES[x.dtype]


def full_vector(dtype: str) -> int:
    """Elements in the widest access."""
    return VECTOR_BYTES // ELEMENT_BYTES[dtype]


def widest_vector(dtype: str, *lengths: int) -> int:
    """Elements in the widest access whose size divides all these lengths: then every such access is aligned."""
    width = full_vector(dtype)
    while any(length % width for length in lengths):
        width //= 2
    return width


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Rounds to nearest, ties to even; what is larger than 448 becomes 448, a NaN stays one.

    By clamping: PyTorch's own conversion makes NaN of what is too large, or not, depending on its version.
    """
    return values.float().clamp(-E4M3_LARGEST, E4M3_LARGEST).to(E4M3)
