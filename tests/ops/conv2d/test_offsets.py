"""Offsets past 2^31: pixel addresses in images larger than 32 bits can count. No such memory is accessed."""

from __future__ import annotations

import ctypes

import pytest
import torch

from escalade.device.twin import build

SOURCE = """
constexpr bool PLACED = @;
#include "conv2d/placement.cuh"
extern "C" __global__ void offsets(const int* pixels, long long* found, ConvShape shape, Placement placement,
                                   int count) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) found[at] = offset(pixels[at], shape, placement);
}
"""
FILTERS, OUTPUT_HEIGHT, OUTPUT_WIDTH, BATCH = 257, 60, 70, 9000
STEP, FIRST = (2, 3), (1, 2)
SIZE = (OUTPUT_HEIGHT * STEP[0], OUTPUT_WIDTH * STEP[1])


class Shape(ctypes.Structure):
    _fields_ = [("sizes", ctypes.c_int * 16)]


class Placement(ctypes.Structure):
    _fields_ = [("sizes", ctypes.c_int * 6)]


@pytest.mark.parametrize("placed", [False, True])
def test_pixels_of_outputs_beyond_32_bits(placed: bool) -> None:
    count = BATCH * OUTPUT_HEIGHT * OUTPUT_WIDTH
    pixels = torch.tensor([0, 1, OUTPUT_WIDTH, count // 4, count // 2, count - OUTPUT_WIDTH, count - 1]).int()
    found = torch.zeros(len(pixels), dtype=torch.int64)
    shape = Shape((BATCH, 1, 1, 1, FILTERS, 1, 1, 1, 1, 0, 0, 1, 1, 1, OUTPUT_HEIGHT, OUTPUT_WIDTH))
    placement = Placement((*STEP, *FIRST, *SIZE))
    kernel = build(SOURCE.replace("@", str(placed).lower()), "offsets")
    kernel.launch(
        (1, 1, 1),
        (32, 1, 1),
        [ctypes.c_void_p(pixels.data_ptr()), ctypes.c_void_p(found.data_ptr()), shape, placement,
         ctypes.c_int(len(pixels))],
        buffers=[(pixels.data_ptr(), pixels.nbytes), (found.data_ptr(), found.nbytes)],
    )  # fmt: skip
    expected = []
    for pixel in pixels.tolist():
        image, inside = divmod(pixel, OUTPUT_HEIGHT * OUTPUT_WIDTH)
        h, w = divmod(inside, OUTPUT_WIDTH)
        place = (image * SIZE[0] + h * STEP[0] + FIRST[0]) * SIZE[1] + w * STEP[1] + FIRST[1]
        expected.append((place if placed else pixel) * FILTERS)
    assert max(expected) > 2**32
    assert found.tolist() == expected
