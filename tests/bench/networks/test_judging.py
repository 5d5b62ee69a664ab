"""Verdicts on networks: the bound from PyTorch's own error, and outliers that a norm would hide."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from escalade.engine.graph.forms import STORAGE
from escalade.ops.base.accuracy import relative_error
from escalade_bench.networks.judging import (
    LEAST,
    MOST,
    PEERS,
    Standard,
    fresh,
    nudged,
    spoil,
    standard,
    tolerance,
)
from escalade_bench.networks.workload import reference


@pytest.mark.parametrize(
    ("dtype", "own", "allowed"),
    [
        ("fp32", 4e-7, 1.6e-6),
        ("fp32", 1e-9, 2.0**-22),
        ("fp32", 1e-4, 1e-5),
        ("tf32", 8e-4, 3.2e-3),
        ("tf32", 3e-7, 2.0**-9),
        ("tf32", 0.1, 5e-3),
        ("fp16", 8e-4, 1.6e-3),
        ("fp16", 0.0, 2.0**-12),
        ("fp16", math.nan, 5e-3),
        ("bf16", 6e-3, 1.2e-2),
        ("bf16", 1.0, 4e-2),
    ],
)
def test_what_is_allowed_is_near_pytorch_s_own_error(dtype: str, own: float, allowed: float) -> None:
    assert tolerance(dtype, own) == pytest.approx(allowed)
    assert tolerance(dtype, own, most=4.0) <= 4 * MOST[dtype]
    assert PEERS == 2.0


def rows(count: int, length: int = 20) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    common = torch.randn(length, generator=generator, dtype=torch.float64)
    return common + 0.3 * torch.randn(count, length, generator=generator, dtype=torch.float64)


def _zeroed(y: torch.Tensor) -> torch.Tensor:
    y[1000:1016] = 0
    return y


def _swapped(y: torch.Tensor) -> torch.Tensor:
    y[[1, 2]] = y[[2, 1]]
    return y


def _wrong_element(y: torch.Tensor) -> torch.Tensor:
    y[77, 7] += 0.5
    return y


def _unwritten(y: torch.Tensor) -> torch.Tensor:
    y[5, 5] = math.nan
    return y


def _too_large(y: torch.Tensor) -> torch.Tensor:
    """Exceed the bound threefold."""
    return y * (1 + 3 * 1.6e-3)


def _one_row_for_all(y: torch.Tensor) -> torch.Tensor:
    return y[:1]


def _transposed(y: torch.Tensor) -> torch.Tensor:
    return y.t()


HARMS = [_zeroed, _swapped, _wrong_element, _unwritten, _too_large, _one_row_for_all, _transposed]


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_wrong_is_seen_however_many_rows_there_are(
    harm: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Sixteen rows of zeros among a million once passed a bound of 5e-3."""
    expected = rows(200_000)
    known = Standard("fp16", (expected,), (8e-4,))
    error, failure = known.judge((expected.half(),))
    assert not failure and error < 3e-4 and known.tolerance == pytest.approx(1.6e-3)
    _, failure = known.judge((harm(expected.half()),))
    assert failure


def test_every_result_is_judged_by_its_own_size_and_their_number_counts() -> None:
    large, small = 1000 * rows(30), rows(30)
    known = Standard("fp32", (large, small), (1e-7, 1e-7))
    assert known.judge((large.float(), small.float()))[1] == ""
    error, failure = known.judge((large, 1.001 * small))
    assert failure.startswith("result 1: its error is 1.00e-03") and error == pytest.approx(1e-6, rel=0.1)
    assert "it has 1 result, not 2" in known.judge((large,))[1]
    assert known.tolerance == pytest.approx(4e-7)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)]
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head((self.body(x) + x).mean((2, 3)))


def test_pytorch_s_own_error_is_that_of_the_dtype() -> None:
    """On the CPU every operator rounds its result, whatever the precision of its sums."""
    model = Net().eval()
    before = [parameter.clone() for parameter in model.parameters()]
    x = torch.randn(8, 8, 12, 12, generator=torch.Generator().manual_seed(1))
    expected = reference(model, x)
    own = {dtype: standard(model, x, dtype, expected).own[0] for dtype in MOST}
    assert own["fp32"] < 1e-6
    assert 5e-5 < own["fp16"] < 3e-3 and 5e-5 < own["tf32"] < 3e-3
    assert own["bf16"] == pytest.approx(8 * own["fp16"], rel=0.6)
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    for dtype, error in own.items():
        assert LEAST[dtype] <= tolerance(dtype, error) <= MOST[dtype]
        assert tolerance(dtype, error) < MOST[dtype] or LEAST[dtype] == MOST[dtype]


def test_fp32_sums_may_be_added_in_order() -> None:
    """PyTorch sums 1,296 products in a more accurate order, so its error cannot bound ours."""
    torch.manual_seed(2)
    model, x = nn.Sequential(nn.Linear(1296, 8)), torch.randn(64, 1296)
    expected = reference(model, x)
    allowed = tolerance("fp32", standard(model, x, "fp32", expected).own[0])
    products = (x[:, None] * model[0].weight).transpose(0, 2)  # type: ignore[operator]
    in_order = functools.reduce(torch.add, products).t() + model[0].bias
    assert relative_error(in_order, expected) < allowed < 4 * relative_error(in_order, expected) < 1e-5


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_inputs_are_nudged_by_less_than_a_dtype_rounds_away(dtype: str) -> None:
    x = torch.randn(2, 8, 5, 5, generator=torch.Generator().manual_seed(2))
    assert nudged(x, dtype, 0) is x
    once, again, other = (nudged(x, dtype, number) for number in (1, 1, 2))
    assert torch.equal(once, again) and not torch.equal(once, other)
    moved, rounded = relative_error(once, x.double()), relative_error(x.to(STORAGE[dtype]), x.double())
    assert 0.5 * rounded < moved < 2 * rounded


def test_what_a_call_left_behind_is_no_result_of_the_next() -> None:
    memory = torch.ones(4)

    def lazy() -> torch.Tensor:
        return memory  # right in the first call, and never written again

    assert bool(fresh(lazy, lambda y: (y,))[0].isnan().all())
    restarts: list[int] = []
    fresh(lambda: torch.ones(2), lambda y: (y,), lambda: restarts.append(1))
    assert len(restarts) == 2
    with torch.inference_mode():
        inferred = torch.ones(3)
    numbers = torch.zeros(2, dtype=torch.uint8)
    spoil((inferred, numbers))
    assert bool(inferred.isnan().all()) and numbers.tolist() == [1, 1]
