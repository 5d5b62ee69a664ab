"""Short chains behind a convolution, at sizes where the plan fuses most: results against float64."""

from __future__ import annotations

import copy
import zlib

import pytest
import torch

import escalade
from escalade_bench.zoo.layers import CONV_CHAINS

pytestmark = pytest.mark.gpu
TOLERANCE = {"tf32": 3e-3, "fp16": 5e-3}
"""Error relative to the norm; sums of TF32 and of 16-bit products are off by less than a third of it."""


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("chain", CONV_CHAINS)
def test_chains_are_right(chain: str, dtype: str) -> None:
    make = CONV_CHAINS[chain]
    torch.manual_seed(zlib.crc32(chain.encode()))
    model = make().eval().cuda()
    for norm in (one for one in model.modules() if isinstance(one, torch.nn.BatchNorm2d)):
        norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
    x = torch.randn(4, *make.example_shape, device="cuda")
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
    if dtype == "fp16":
        model, x = model.half(), x.half().contiguous(memory_format=torch.channels_last)
    found = escalade.compile(model, x, dtype=dtype)(x).double()
    if float(expected.abs().max()) > torch.finfo(x.dtype).max:  # the sum of all pixels in fp16
        assert bool(found.isinf().all())
        return
    error = float((found - expected).norm() / expected.norm())
    assert error < TOLERANCE[dtype]
