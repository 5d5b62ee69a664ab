"""Winograd's transforms alone: their matrices are the algorithm's, to the last digit of the constants."""

from __future__ import annotations

import ctypes
import re

import pytest
import torch

from escalade.device.sources import read
from escalade.device.twin import build

# The header's own text, with sums in double: the remaining error is that of its fp32 constants.
SOURCE = """
#define float double
#include "common/winograd.cuh"
#undef float
constexpr int SIDE = @, PATCH = Winograd<SIDE>::PATCH;
extern "C" __global__ void convolve(const double* patches, const double* filters, double* y, int count) {
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= count) return;
    double d[PATCH][PATCH], g[3][3], u[PATCH][PATCH];
    for (int i = 0; i < PATCH * PATCH; ++i) d[i / PATCH][i % PATCH] = patches[at * PATCH * PATCH + i];
    for (int i = 0; i < 9; ++i) g[i / 3][i % 3] = filters[at * 9 + i];
    transform_input(d);
    transform_filter(g, u);
    for (int i = 0; i < PATCH * PATCH; ++i) d[i / PATCH][i % PATCH] *= u[i / PATCH][i % PATCH];
    transform_output(d);
    for (int i = 0; i < SIDE * SIDE; ++i) y[at * SIDE * SIDE + i] = d[i / SIDE][i % SIDE];
}
"""
CONSTANTS = {2: 0.0, 4: 2.5e-7}
"""Error bounds per tile: halves are exact, sqrt(2) and 1/3 have relative errors of up to 2^-24."""


def convolved(tile: int, patches: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
    y = torch.empty(len(patches), tile, tile, dtype=torch.float64)
    tensors = (patches.contiguous(), filters.contiguous(), y)
    kernel = build(SOURCE.replace("@", str(tile)), "convolve")
    arguments = [*(ctypes.c_void_p(t.data_ptr()) for t in tensors), ctypes.c_int(len(patches))]
    buffers = [(t.data_ptr(), t.nbytes) for t in tensors]
    kernel.launch((-(-len(patches) // 256), 1, 1), (256, 1, 1), arguments, buffers=buffers)
    return y


@pytest.mark.parametrize("tile", [2, 4])
def test_every_pixel_meets_every_weight_where_it_should(tile: int) -> None:
    """One pixel of a patch times one weight of a filter is one output, or none: the whole algorithm, term by term."""
    side = tile + 2
    pixels = torch.eye(side * side, dtype=torch.float64).view(-1, 1, side, side).expand(-1, 9, -1, -1)
    weights = torch.eye(9, dtype=torch.float64).view(1, 9, 3, 3).expand(side * side, -1, -1, -1)
    y = convolved(tile, pixels.reshape(-1, side, side), weights.reshape(-1, 3, 3))
    expected = torch.zeros(side, side, 3, 3, tile, tile, dtype=torch.float64)
    for h in range(side):
        for w in range(side):
            for r in range(3):
                for s in range(3):
                    if 0 <= h - r < tile and 0 <= w - s < tile:
                        expected[h, w, r, s, h - r, w - s] = 1
    assert float((y - expected.view_as(y)).abs().max()) <= CONSTANTS[tile]


def test_points_are_the_nearest_floats() -> None:
    text = read("common/winograd.cuh")
    found = dict(re.findall(r"constexpr float (\w+) = ([0-9.]+)f;", text))
    two = torch.tensor(2.0, dtype=torch.float64)
    for name, exact in (("NEAR_POINT", 1 / two.sqrt()), ("FAR_POINT", two.sqrt())):
        assert torch.tensor(float(found[name])).float() == exact.float()
