"""Quantization to FP8 on the twin, against the nearest of all codes."""

from __future__ import annotations

import pytest
import torch

from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, quantise
from escalade.ops.base.cards import typical_card
from escalade.ops.base.dtypes import E4M3, to_e4m3
from escalade.ops.quantise import QuantiseProblem
from tests import formulas

ONE = torch.ones(1)
RUNGS = ("naive", "vectorised")


def _codes(values: torch.Tensor) -> torch.Tensor:
    """With a single NaN for all: conversions may return any."""
    codes = values.view(torch.uint8)
    return torch.where(codes & 0x7F == 0x7F, 0x7F, codes)


def _floats() -> torch.Tensor:
    """Every code, the midpoint between neighbors, both floats beside each, and far values."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    finite = codes[codes.isfinite()].unique()
    middles = (finite[1:] + finite[:-1]) / 2
    exact = torch.cat([codes, middles])
    beside = [torch.nextafter(exact, torch.full_like(exact, limit)) for limit in (-torch.inf, torch.inf)]
    bits = torch.randint(-(2**31), 2**31, (20_000,), generator=torch.Generator().manual_seed(0))
    far = torch.tensor([448.0, 464.0, 480.0, 1e30, torch.inf, torch.nan, 2.0**-10, 2.0**-149, 0.0])
    return torch.cat([exact, *beside, far, -far, bits.int().view(torch.float32)])


@pytest.mark.parametrize("rung", RUNGS)
def test_floats_become_the_nearest_code_and_never_more_than_the_largest(rung: str) -> None:
    x = _floats()
    assert torch.equal(_codes(quantise(x, ONE, rung=rung)), formulas.e4m3(x))
    assert torch.equal(_codes(to_e4m3(x)), formulas.e4m3(x))


@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_16_bit_float(dtype: torch.dtype, rung: str) -> None:
    x = torch.arange(2**16).to(torch.uint16).view(dtype)
    factor = torch.tensor([0.3])
    assert torch.equal(_codes(quantise(x, factor, rung=rung)), formulas.e4m3(x.float() * factor))


def test_what_is_too_large_saturates_and_a_nan_stays() -> None:
    y = quantise(torch.tensor([500.0, -torch.inf, torch.nan, 464.1]), ONE).float()
    assert y[[0, 1, 3]].tolist() == [448.0, -448.0, 448.0] and y[2].isnan()


def test_the_result_has_the_layout_of_x() -> None:
    x = torch.randn(2, 5, 3, 7).contiguous(memory_format=torch.channels_last)
    y = quantise(x, ONE)
    assert y.dtype == E4M3 and y.stride() == x.stride()
    assert torch.equal(_codes(y), _codes(to_e4m3(x)))
    strided = torch.randn(6, 8)[::2, 1::3]
    assert torch.equal(_codes(quantise(strided, ONE)), _codes(to_e4m3(strided)))
    assert quantise(torch.empty(0, 3), ONE).shape == (0, 3)


def test_errors() -> None:
    x = torch.randn(3)
    with pytest.raises(UnsupportedError, match="float32, float16 or bfloat16"):
        quantise(x.double(), ONE)
    with pytest.raises(UnsupportedError, match="factor: 1 of float32"):
        quantise(x, torch.ones(2))
    with pytest.raises(UnsupportedError, match="does not name a quantization"):
        QuantiseProblem.parse("relu_8")
    with pytest.raises(UnsupportedError, match="no rung 'nonsense'"):
        quantise(torch.empty(0), ONE, rung="nonsense")
    with pytest.raises(UnsupportedError, match="no gradient"):
        quantise(x.requires_grad_(), ONE).float().sum().backward()


def test_older_cards_are_refused() -> None:
    rung = OPERATIONS["quantise"].ladder.rung("vectorised")
    assert "this GPU is sm_80" in (rung.on(typical_card("sm_80")).refusal(QuantiseProblem(8)) or "")
    assert rung.on(typical_card("sm_90a")).refusal(QuantiseProblem(8)) is None
