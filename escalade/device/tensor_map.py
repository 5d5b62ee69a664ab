"""Tensor maps for the GPU's Tensor Memory Accelerator (TMA), encoded by the driver."""

from __future__ import annotations

import ctypes
import itertools
import operator
from functools import lru_cache
from typing import Any

from escalade.device.driver import check
from escalade.device.recipe import Im2colMap, TensorMap, TiledMap
from escalade.errors import UnsupportedError

ELEMENT_BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "tf32": 4, "fp8": 1, "int8": 1, "uint8": 1}
DATA_TYPES = {
    "fp16": "FLOAT16",
    "bf16": "BFLOAT16",
    "fp32": "FLOAT32",
    "tf32": "FLOAT32",
    "fp8": "UINT8",
    "int8": "UINT8",
    "uint8": "UINT8",
}
"""Names of the driver's data types, after CU_TENSOR_MAP_DATA_TYPE_."""
_SWIZZLES = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
_MAP_BYTES = 128


def strides_of(tensor_map: TensorMap) -> tuple[int, ...]:
    """Return the strides in bytes of all dimensions but the innermost."""
    if isinstance(tensor_map, TiledMap) and tensor_map.strides:
        return tensor_map.strides
    inner = ELEMENT_BYTES[tensor_map.element] * tensor_map.sizes[0]
    if isinstance(tensor_map, Im2colMap) and tensor_map.pitch:
        inner = tensor_map.pitch
    return tuple(itertools.accumulate((inner, *tensor_map.sizes[1:-1]), operator.mul))


@lru_cache(maxsize=4096)
def encode(tensor_map: TensorMap, address: int) -> bytes:
    """Return the 128 bytes that a kernel takes by value. Cached, because allocators reuse addresses."""
    from cuda.bindings import driver

    if address % 16 or any(stride % 16 for stride in strides_of(tensor_map)):
        raise UnsupportedError(
            f"{tensor_map.buffer.name} has address {address:#x} and strides {strides_of(tensor_map)}; a tensor map "
            "needs multiples of 16 bytes"
        )
    data_type = getattr(
        driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{DATA_TYPES[tensor_map.element]}"
    )
    sizes = _long(driver, tensor_map.sizes)
    strides = _long(driver, strides_of(tensor_map))
    rest = (
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        getattr(driver.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLES[tensor_map.swizzle]}"),
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    rank = len(tensor_map.sizes)
    match tensor_map:
        case TiledMap():
            steps = _int(driver, (1,) * rank)
            result = driver.cuTensorMapEncodeTiled(
                data_type, rank, address, sizes, strides, _int(driver, tensor_map.box), steps, *rest
            )
        case Im2colMap():
            steps = _int(driver, (1, *tensor_map.stride, 1))
            result = driver.cuTensorMapEncodeIm2col(
                data_type, rank, address, sizes, strides, list(tensor_map.lower), list(tensor_map.upper),
                tensor_map.channels, tensor_map.pixels, steps, *rest,
            )  # fmt: skip
    encoded = check(result, f"encoding {tensor_map}")
    return ctypes.string_at(encoded.getPtr(), _MAP_BYTES)


def _long(driver: Any, values: tuple[int, ...]) -> list[Any]:
    return [driver.cuuint64_t(value) for value in values]


def _int(driver: Any, values: tuple[int, ...]) -> list[Any]:
    return [driver.cuuint32_t(value) for value in values]
