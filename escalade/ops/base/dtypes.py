"""Element types: our names, PyTorch's storage types, and their CUDA types.

`tf32` is fp32 storage multiplied in TF32; `fp8` is E4M3; `int8` holds integers times a scale.
"""

from __future__ import annotations

import torch

from escalade.device.sources import C_TYPES, Type
from escalade.errors import UnsupportedError

E4M3 = torch.float8_e4m3fn
LARGEST = {"fp8": 448.0, "int8": 127.0}
"""Quantized dtypes of one byte, and the largest magnitude of each that scales are chosen for."""
QUANTIZED = tuple(LARGEST)

STORAGE = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": E4M3,
    "int8": torch.int8,
    "uint8": torch.uint8,
}
ELEMENT_BYTES = {name: storage.itemsize for name, storage in STORAGE.items()}
DTYPES = ("fp32", "fp16", "bf16")
"""Dtypes that every operation supports."""
MULTIPLIED = ("fp32", "tf32", "fp16", "bf16")
"""Dtypes of operations that multiply."""
NAMES = {STORAGE[name]: name for name in DTYPES}
VECTOR_BYTES = 16
"""Widest memory access of a thread."""


def element(dtype: str) -> Type:
    """Return the CUDA type of an element."""
    return Type(C_TYPES[dtype])


def dtype_of(operation: str, x: torch.Tensor) -> str:
    if x.dtype not in NAMES:
        raise UnsupportedError(f"x is {x.dtype}; {operation} supports float32, float16 and bfloat16")
    return NAMES[x.dtype]


def multiplied_as(x: torch.Tensor, tf32: bool) -> str:
    """Return the dtype of a problem that multiplies x."""
    return "tf32" if tf32 else NAMES[x.dtype]


def full_vector(dtype: str) -> int:
    """Return the elements per 16-byte access."""
    return VECTOR_BYTES // ELEMENT_BYTES[dtype]


def widest_vector(dtype: str, *lengths: int) -> int:
    """Return the widest access, in elements, that divides all lengths, so that every access is aligned."""
    width = full_vector(dtype)
    while any(length % width for length in lengths):
        width //= 2
    return width


def to_e4m3(values: torch.Tensor) -> torch.Tensor:
    """Round to nearest even, saturating at ±448; NaN is preserved.

    The clamp is explicit because overflow gives NaN or 448 depending on the PyTorch version.
    """
    return values.float().clamp(-LARGEST["fp8"], LARGEST["fp8"]).to(E4M3)


def to_int8(values: torch.Tensor) -> torch.Tensor:
    """Round to nearest even, saturating at -128 and 127; NaN becomes -128."""
    return values.float().round().clamp(-128, 127).nan_to_num(-128).to(torch.int8)


def stored_as(values: torch.Tensor, storage: torch.dtype) -> torch.Tensor:
    """Return the values in a storage type, rounded and saturated as kernels do."""
    if storage == torch.int8 and values.is_floating_point():
        return to_int8(values)
    return to_e4m3(values) if storage == E4M3 else values.to(storage)
