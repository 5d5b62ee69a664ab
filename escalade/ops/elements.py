"""Element types, as they are named, as PyTorch stores them and as kernels declare them, and how many make a launch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.device.program import Type
from escalade.errors import UnsupportedError

STORAGE = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "uint8": torch.uint8,
}
ELEMENT_BYTES = {name: storage.itemsize for name, storage in STORAGE.items()}
DTYPES = ("fp32", "fp16", "bf16")
"""What every operation takes; some take more."""
NAMES = {STORAGE[name]: name for name in DTYPES}
VECTOR_BYTES = 16
"""The widest access that a thread has."""
SMS = 132
"""The defaults are chosen for an H200; other cards have the tuner."""
CLUSTERS = {1: SMS, 2: 66, 3: 40, 4: 28, 5: 22, 6: 16, 7: 14, 8: 14}
"""Clusters of so many blocks that an H200 runs at once, one block a multiprocessor: their blocks are neighbours."""
FILLED = 4 * SMS
"""Blocks that keep a large card busy: four on each multiprocessor."""
SHARED_BYTES: Mapping[str, int] = {
    "sm_80": 163 * 1024,
    "sm_86": 99 * 1024,
    "sm_89": 99 * 1024,
    "sm_90a": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
}
"""The shared memory of a block, by architecture."""
MOST_SHARED = max(SHARED_BYTES.values())
"""Of a block on Hopper and on data-centre Blackwell. A multiprocessor has 1 KiB more for all its blocks together, each
of which takes 1 KiB besides what it asks for."""
LEAST_SHARED = min(SHARED_BYTES.values())
"""Of a block on every card since Ampere."""

_DECLARED = {
    "fp32": "float",
    "tf32": "float",
    "fp16": "__half",
    "bf16": "__nv_bfloat16",
    "uint8": "unsigned char",
}


def element(dtype: str) -> Type:
    """As kernels name it."""
    return Type(_DECLARED[dtype])


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


def ceil_div(work: int, each: int) -> int:
    """How many pieces of `each` it takes."""
    return -(-work // each)


def blocks(work: int, each: int) -> int:
    """The same of a launch, which has at least one."""
    return max(1, ceil_div(work, each))
