"""Memory layout of tensors: the one place that decides whether kernels can use a tensor where it is.

Kernels read and write packed tensors: no gaps, no overlap, in row-major order (`flat`, `nchw`) or in channels_last
(`nhwc`), from an aligned address. A caller's tensor may have any strides. Every entry point asks `layout_of` which
layout to plan for, uses the tensor itself if `is_packed` and `is_aligned` hold, and otherwise copies it to memory from
`empty`. Memory for a copy never takes the strides of its source: `torch.empty_like` would keep a permutation.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

ALIGNMENT = 16
"""Bytes: the widest load of a kernel."""
MEMORY_FORMAT = {
    "flat": torch.contiguous_format,
    "nchw": torch.contiguous_format,
    "nhwc": torch.channels_last,
}


def layout_of(tensor: torch.Tensor) -> str:
    """Return the layout that kernels read this tensor, or a copy of it, in.

    `nhwc` for packed channels_last images, `nchw` for all other tensors of 4 dimensions, `flat` for other ranks.
    Images with one channel or one pixel are packed in both layouts; they are `nchw`.
    """
    if tensor.dim() != 4:
        return "flat"
    channels_last = not tensor.is_contiguous() and is_packed(tensor, "nhwc")
    return "nhwc" if channels_last else "nchw"


def is_packed(tensor: torch.Tensor, layout: str) -> bool:
    """Return True if the strides are exactly those of the layout; those of size-1 dimensions may be anything."""
    return tensor.is_contiguous(memory_format=MEMORY_FORMAT[layout])


def is_aligned(tensor: torch.Tensor) -> bool:
    return tensor.data_ptr() % ALIGNMENT == 0


def aligned(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy if its address is not aligned, as that of a slice may be."""
    return tensor if is_aligned(tensor) else tensor.clone()


def aligned_alike(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy with its strides if its address is not aligned: `clone` would close the gaps."""
    if is_aligned(tensor):
        return tensor
    span = tensor.as_strided((_extent(tensor.shape, tensor.stride()),), (1,)).clone()
    return span.as_strided(tensor.shape, tensor.stride())


def packed(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the tensor if it is packed in that layout, else a copy that is."""
    return tensor.contiguous(memory_format=MEMORY_FORMAT[layout])


def empty(
    shape: Sequence[int], dtype: torch.dtype, layout: str, device: torch.device | str | None
) -> torch.Tensor:
    """Allocate memory for a packed tensor."""
    return torch.empty(tuple(shape), dtype=dtype, device=device, memory_format=MEMORY_FORMAT[layout])


def same_order(shape: Sequence[int], one: Sequence[int], other: Sequence[int]) -> bool:
    """Return True if two sets of strides address the same elements. Strides of size-1 dimensions are free."""
    return tuple(one) == tuple(other) or all(
        size <= 1 or first == second for size, first, second in zip(shape, one, other, strict=True)
    )


# --- overlapping memory


def has_overlap(tensor: torch.Tensor) -> bool:
    """Return True if two elements of the tensor share an address, as in expanded tensors and sliding windows."""
    return _repeats(tuple(tensor.shape), tensor.stride())


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if an element of one tensor shares bytes with an element of the other, on the same device.

    Tensors in each other's gaps do not: the even and the odd columns of one matrix.
    """
    if not one.numel() or not other.numel():
        return False
    first, second = (one, other) if one.data_ptr() <= other.data_ptr() else (other, one)
    distance = second.data_ptr() - first.data_ptr()
    if distance >= _extent(first.shape, first.stride()) * first.element_size():
        return False
    kinds = [(tuple(each.shape), each.stride(), each.element_size()) for each in (first, second)]
    return _share_bytes(*kinds[0], *kinds[1], distance)


def is_disjoint(tensor: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    """Return True if the tensor's storage shares no bytes with these: it may be written while they are read.

    Storages are compared by address range: NumPy views of one array are storages of their own in the same memory.
    """
    storage = tensor.untyped_storage()
    begin = storage.data_ptr()
    end = begin + storage.nbytes()
    for other in others:
        memory = other.untyped_storage()
        first = memory.data_ptr()
        if first == begin or (first < end and begin < first + memory.nbytes()):
            return False
    return True


def _extent(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Elements from the first address to the last, both included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


@lru_cache(maxsize=1024)
def _repeats(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if not math.prod(shape):
        return False
    dimensions = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    reach = 0
    for stride, size in dimensions:
        if stride <= reach:
            break
        reach += stride * (size - 1)
    else:
        return False  # each dimension steps past all that the inner ones reach
    if not dimensions[0][0]:
        return True
    return int(_touched(shape, strides, 1, _extent(shape, strides)).count_nonzero()) < math.prod(shape)


@lru_cache(maxsize=1024)
def _share_bytes(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    width: int,
    other_shape: tuple[int, ...],
    other_strides: tuple[int, ...],
    other_width: int,
    distance: int,
) -> bool:
    """Compare byte by byte. Costs a pass over both tensors, once per pair of shapes and strides."""
    size = _extent(shape, strides) * width
    other_size = _extent(other_shape, other_strides) * other_width
    common = min(size - distance, other_size)
    first = _touched(shape, strides, width, size)[distance : distance + common]
    second = _touched(other_shape, other_strides, other_width, other_size)[:common]
    return bool((first & second).any())


def _touched(shape: Sequence[int], strides: Sequence[int], width: int, size: int) -> torch.Tensor:
    """Return a flag per byte: True where an element of `width` bytes is stored."""
    flags = torch.zeros(size, dtype=torch.bool, device="cpu")
    steps = [stride * width for stride in strides]
    kept = [
        (length, step) for length, step in zip(shape, steps, strict=True) if step
    ]  # repeated elements need a single write
    flags.as_strided((*(length for length, _ in kept), width), (*(step for _, step in kept), 1)).fill_(True)
    return flags
