"""The forms of GELU: their errors, and that NaN stays NaN."""

from __future__ import annotations

import ctypes

import pytest
import torch
import torch.nn.functional as F

from escalade.device.twin import build
from tests import formulas

SOURCE = """
#include "common/gelu.cuh"
extern "C" __global__ void form(const float* x, float* y, int count) {{
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count) y[at] = {form}(x[at]);
}}
"""
LARGEST_ERRORS = {
    "gelu_erf": ("none", 5e-7),
    "gelu_fine": ("none", 7e-7),
    "gelu_fitted": ("none", 5.5e-6),
    "gelu_tanh_approximate": ("none", 4.8e-4),
    "gelu_tanh": ("tanh", 5e-7),
    "gelu_tanh_by_exp2": ("tanh", 6e-7),
}
"""Over [-10, 10]: the PyTorch function that a form computes, and its error, taking the tanh, 2^x and 1 / x
of the special-function unit as exact; the card's tanh adds up to 2^-11 of x."""


def computed(form: str, x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (x, y)]
    grid = (-(-x.numel() // 256), 1, 1)
    buffers = [(tensor.data_ptr(), 4 * x.numel()) for tensor in (x, y)]
    build(SOURCE.format(form=form), "form").launch(
        grid, (256, 1, 1), [*pointers, ctypes.c_int(x.numel())], buffers=buffers
    )
    return y


@pytest.mark.parametrize("form", LARGEST_ERRORS)
def test_the_largest_error(form: str) -> None:
    approximate, largest = LARGEST_ERRORS[form]
    x = torch.linspace(-10, 10, 100_001)
    error = (computed(form, x).double() - F.gelu(x.double(), approximate=approximate)).abs().max()
    assert float(error) <= largest
    assert float(error) >= largest / 20, "it is better than what is said of it"


@pytest.mark.parametrize("form", LARGEST_ERRORS)
def test_large_numbers_and_none_at_all(form: str) -> None:
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([inf, -inf, nan, 1e38, -1e38, 1e19, -1e19, 40.0, -40.0, 0.0])
    approximate = LARGEST_ERRORS[form][0]
    torch.testing.assert_close(computed(form, x), formulas.gelu(x, approximate).float(), equal_nan=True)
