"""Sums of filters: names, limits, and that their convolution equals one over repeated pixels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from escalade.errors import UnsupportedError
from escalade.ops.filter_sums import FilterSumsProblem, summed

PLAIN = FilterSumsProblem(256, 128, 3, 3, zeros=True)


def test_names_are_stable() -> None:
    assert PLAIN.name == "128_3_zeros_b256" and FilterSumsProblem.parse(PLAIN.name) == PLAIN
    assert FilterSumsProblem.parse("8_3x4_b2") == FilterSumsProblem(2, 8, 3, 4)
    with pytest.raises(UnsupportedError, match="the form is"):
        FilterSumsProblem.parse("8_3x4")


def test_filters_without_a_window_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="filters of 1 x 3 have no window"):
        FilterSumsProblem(4, 8, 1, 3)


def test_repeated_pixels_need_not_be_written() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, 5, 4).double(), torch.randn(7, 3, 3, 3).double()
    wanted = F.conv2d(F.interpolate(x, scale_factor=2), weight, padding=1)
    torch.testing.assert_close(F.conv_transpose2d(x, summed(weight, zeros=True), stride=2, padding=1), wanted)
