"""The mean over windows: names, limits, PyTorch's rules for divisors, and the operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st

from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, avg_pool2d
from escalade.ops.avg_pool2d import AvgPool2dProblem
from escalade.ops.base.card import H200
from escalade.ops.choose.choice import choose
from tests.support import check

CPU = torch.device("cpu")
PLAIN = AvgPool2dProblem(2, 8, 9, 9, (3, 3), (2, 2), (1, 1))


@st.composite
def problems(draw: st.DrawFn) -> AvgPool2dProblem:
    def two(low: int, high: int) -> tuple[int, int]:
        return draw(st.integers(low, high)), draw(st.integers(low, high))

    try:
        return AvgPool2dProblem(
            draw(st.integers(0, 2)), draw(st.integers(1, 3)), *two(1, 9), two(1, 5), two(1, 4), two(0, 2),
            draw(st.booleans()), count_padding=draw(st.booleans()), divisor=draw(st.integers(0, 5)),
        )  # fmt: skip
    except UnsupportedError:  # more padding than half the kernel, or a kernel larger than the image
        assume(False)
        raise


@given(problems())
def test_parse_is_the_inverse_of_name(problem: AvgPool2dProblem) -> None:
    assert AvgPool2dProblem.parse(problem.name) == problem


def test_names_are_stable() -> None:
    problem = AvgPool2dProblem(2, 8, 2, 5, (3, 1), (2, 1), (1, 0), True, count_padding=False, divisor=3)
    assert problem.name == "8_2x5_k3x1s2x1p1x0_b2_ceil_inside_by3"
    with pytest.raises(UnsupportedError, match="the form is"):
        AvgPool2dProblem.parse("8_2x5_k3")


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"padding": (2, 2)}, "padding 2 with kernel 3: it must be at most half"),
        ({"kernel": (13, 3)}, "the kernel has 13x3 pixels.*only 11x11"),
        ({"stride": (2**24, 1)}, "avg_pool2d supports less than 2\\^24"),
        ({"divisor": -1}, "divisor is -1"),
    ],
)
def test_impossible_problems_are_refused_with_a_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        replace(PLAIN, **change)


def test_the_preferred_rung_follows_layout_and_window() -> None:
    nhwc = replace(PLAIN, layout="nhwc")
    large = replace(nhwc, height=40, width=40, kernel=(31, 31))
    chosen = [choose(OPERATIONS["avg_pool2d"], p, CPU).rung.name for p in (PLAIN, nhwc, large)]
    assert chosen == ["row_packs", "vectorised", "naive"]


def test_the_operator_is_pytorchs_and_has_its_gradient() -> None:
    x = torch.randn(2, 8, 7, 7, generator=torch.Generator().manual_seed(3), requires_grad=True)
    ours = avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False)
    theirs = F.avg_pool2d(x, 3, 2, 1, True, False)
    torch.testing.assert_close(ours, theirs)
    (gradient,) = torch.autograd.grad(ours.square().sum(), x)
    (expected,) = torch.autograd.grad(theirs.square().sum(), x)
    torch.testing.assert_close(gradient, expected)
    with pytest.raises(UnsupportedError, match="divisor_override is 0"):
        avg_pool2d(x, 3, divisor_override=0)


def test_a_nan_is_in_its_means_alone() -> None:
    x = torch.ones(1, 8, 6, 6).to(memory_format=torch.channels_last)
    x[0, 1, 0, 0] = float("nan")
    y = avg_pool2d(x, 2, padding=1)
    assert torch.equal(y.isnan(), F.avg_pool2d(x, 2, padding=1).isnan()) and y.isnan().sum() == 1


def test_the_outputs_per_thread_follow_the_size() -> None:
    rung: Any = OPERATIONS["avg_pool2d"].ladder.rung("vectorised").on(H200)
    image = replace(PLAIN, channels=64, height=64, width=64, dtype="fp16", layout="nhwc")
    found = [rung.configs(replace(image, batch=batch))[0] for batch in (1, 16, 256)]
    assert [(one.rows, one.columns, one.threads) for one in found] == [(1, 1, 64), (1, 1, 128), (2, 2, 128)]
    registers = [rung.blocks_per_sm(one) * one.threads * 64 for one in found]
    assert registers == [H200.registers, H200.registers, 0]


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_every_run_of_outputs(dtype: str, seed: int) -> None:
    problem = AvgPool2dProblem(
        2, 24, 9, 11, (3, 3), (2, 2), (1, 1), dtype=dtype, layout="nhwc", count_padding=False
    )
    operation = OPERATIONS["avg_pool2d"]
    rung = operation.ladder.rung("vectorised")
    for config in rung.configs(problem):
        check(operation, rung, problem, config, CPU, seed)


@pytest.mark.parametrize(
    "problem",
    [
        AvgPool2dProblem(2, 3, 8, 16, (2, 2), (2, 2)),
        AvgPool2dProblem(2, 3, 8, 16, (2, 2), (2, 2), prologue="gain * x + shift"),
        AvgPool2dProblem(2, 3, 9, 17, (3, 3), (2, 2)),
        AvgPool2dProblem(2, 3, 8, 16, (3, 3), (2, 2), (1, 1)),
        AvgPool2dProblem(2, 3, 9, 16, (3, 3), (2, 2), (1, 1), ceil_mode=True),
        AvgPool2dProblem(3, 5, 1, 32, (1, 2), (1, 2), divisor=3),
    ],
    ids=lambda problem: problem.name,
)
def test_every_run_of_a_row(problem: AvgPool2dProblem, seed: int) -> None:
    operation = OPERATIONS["avg_pool2d"]
    rung = operation.ladder.rung("row_packs")
    for config in rung.configs(problem):
        check(operation, rung, problem, config, CPU, seed)
