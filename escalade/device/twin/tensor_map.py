"""Tensor maps for the twin's TMA: 128 bytes as on the GPU, but in the twin's own format."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from escalade.device.recipe import Im2colMap, TensorMap, TiledMap
from escalade.device.tensor_map import ELEMENT_BYTES, strides_of
from escalade.errors import UnsupportedError

MAP_BYTES = 128
_SWIZZLE_MODES = {0: 0, 32: 1, 64: 2, 128: 3}
# twin::MapFields of runtime/units.h: base, strides, sizes, box, pixels, corners, steps, four small ones, mark.
_LAYOUT = struct.Struct("=Q 4Q 5I 5H H 3h 3h 5B B B B B 3s")


def encode(tensor_map: TensorMap, address: int) -> bytes:
    """Encode a recipe's tensor map for the tensor at `address`."""
    common = (address, ELEMENT_BYTES[tensor_map.element], tensor_map.sizes, strides_of(tensor_map))
    match tensor_map:
        case TiledMap():
            return encode_tiled(*common, tensor_map.box, tensor_map.swizzle)
        case Im2colMap(lower=lower, upper=upper, channels=channels, pixels=pixels, stride=stride):
            return encode_im2col(*common, lower, upper, channels, pixels, stride, tensor_map.swizzle)


def encode_tiled(
    address: int,
    element_bytes: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int = 128,
) -> bytes:
    """Encode a tiled map, innermost dimension first; strides in bytes, of all dimensions but the first.

    Loads outside the tensor return zeros, stores there are dropped.
    """
    if len(box) != len(sizes) or not all(1 <= extent <= 256 for extent in box):
        raise UnsupportedError(f"a box of {tuple(box)} elements; each extent must be from 1 to 256")
    return _encode(address, element_bytes, sizes, strides, box, swizzle)


def encode_im2col(
    address: int,
    element_bytes: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    lower: Sequence[int],
    upper: Sequence[int],
    channels: int,
    pixels: int,
    steps: Sequence[int],
    swizzle: int = 128,
) -> bytes:
    """Encode an im2col map over a tensor of sizes C, W, H, [D,] N; corners and steps are those of W, H and D."""
    if not 1 <= channels <= 256 or not 1 <= pixels <= 1024:
        raise UnsupportedError(
            f"{channels} channels of {pixels} pixels; at most 256 and 1024 are copied at once"
        )
    return _encode(
        address, element_bytes, sizes, strides, (channels,), swizzle, pixels, lower, upper, (1, *steps, 1)
    )


def _encode(
    address: int,
    element_bytes: int,
    sizes: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int,
    pixels: int = 0,
    lower: Sequence[int] = (),
    upper: Sequence[int] = (),
    steps: Sequence[int] = (),
) -> bytes:
    if not 1 <= len(sizes) <= 5 or len(strides) != len(sizes) - 1:
        raise UnsupportedError(
            f"sizes {sizes}, strides {strides}: a tensor map has 1 to 5 dimensions and a stride for all but the first"
        )
    if address % 16 or any(stride % 16 for stride in strides):
        raise UnsupportedError(
            f"address {address:#x}, strides {tuple(strides)}: a tensor map needs multiples of 16 bytes"
        )
    row = box[0] * element_bytes
    if swizzle not in _SWIZZLE_MODES or row % 16 or (swizzle and row != swizzle):
        raise UnsupportedError(
            f"rows of {row} bytes with a swizzle of {swizzle}; the twin supports rows of a multiple of 16 bytes, "
            f"and with a swizzle rows of its length (32, 64 or 128)"
        )
    return _LAYOUT.pack(
        address,
        *_padded(strides, 4),
        *_padded(sizes, 5),
        *_padded(box, 5),
        pixels,
        *_padded(lower, 3),
        *_padded(upper, 3),
        *_padded(steps, 5),
        len(sizes),
        element_bytes,
        _SWIZZLE_MODES[swizzle],
        pixels > 0,
        b"TWN",
    ).ljust(MAP_BYTES, b"\0")


def _padded(values: Sequence[int], length: int) -> list[int]:
    return [*values, *([0] * (length - len(values)))]
