"""What operations on batches of images share: element types, layouts, names, and the size of a launch."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.device.program import Type
from escalade.errors import UnsupportedError

STORAGE = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "uint8": torch.uint8,
}
ELEMENT_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "uint8": 1}
DTYPES = ("fp32", "fp16", "bf16")
LAYOUTS = ("nchw", "nhwc")
MEMORY_FORMAT = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
VECTOR_BYTES = 16
"""The widest access that a thread has."""

_ELEMENTS = {"fp32": "float", "fp16": "__half", "bf16": "__nv_bfloat16", "uint8": "unsigned char"}


def element(dtype: str) -> Type:
    """As kernels name it."""
    return Type(_ELEMENTS[dtype])


def blocks(work: int, each: int) -> int:
    """How many pieces of `each` it takes; a launch has at least one."""
    return max(1, -(-work // each))


def widest_vector(dtype: str, *lengths: int) -> int:
    """Elements in the widest access whose size divides all these lengths: then every such access is aligned."""
    width = VECTOR_BYTES // ELEMENT_BYTES[dtype]
    while any(length % width for length in lengths):
        width //= 2
    return width


def spell_pair(values: tuple[int, int]) -> str:
    """`56` for a square, `56x48` otherwise."""
    return str(values[0]) if values[0] == values[1] else f"{values[0]}x{values[1]}"


def require(operation: str, what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UnsupportedError(f"{what} {value!r}: {operation} takes {', '.join(known)}")


def require_at_least(minimum: int, values: Mapping[str, int]) -> None:
    for what, value in values.items():
        if value < minimum:
            raise UnsupportedError(f"{what} of {value}: it must be at least {minimum}")


def require_32_bits(operation: str, image_elements: int) -> None:
    """Images are counted in 64 bits, what is inside one in 32."""
    if image_elements >= 2**31:
        raise UnsupportedError(
            f"{operation} counts the elements of one image in 32 bits; here there are {image_elements}. Split the image"
        )
