"""softmax: its problem, its infinities, and agreement with PyTorch as an operator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from escalade.device.run import bind
from escalade.errors import UnsupportedError
from escalade.ops import softmax
from escalade.ops.base.draw import Draw
from escalade.ops.softmax import SoftmaxOperation, SoftmaxProblem, random_inputs
from tests import formulas

INF, NAN = float("inf"), float("nan")
RUNGS = [rung.name for rung in SoftmaxOperation.ladder]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def assert_close(result: torch.Tensor, expected: torch.Tensor, atol: float = 1e-7) -> None:
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[result.dtype]
    torch.testing.assert_close(result, expected.to(result.dtype), rtol=tolerance, atol=atol, equal_nan=True)


def test_names_and_sizes() -> None:
    problem = SoftmaxProblem.parse("1000_b32", "bf16")
    assert problem == SoftmaxProblem(32, 1000, "bf16") and problem.name == "1000_b32"
    assert problem.bytes == 2 * 2 * 32 * 1000
    assert SoftmaxProblem.parse("67_b2_inner40_log") == SoftmaxProblem(2, 67, inner=40, log=True)
    assert SoftmaxProblem.parse("67_b2[x*2]") == SoftmaxProblem(2, 67, activation="x * 2")
    with pytest.raises(UnsupportedError, match="the form is"):
        SoftmaxProblem.parse("softmax")
    with pytest.raises(UnsupportedError, match="dtype 'tf32'"):
        SoftmaxProblem(1, 1, "tf32")


@pytest.mark.parametrize("rung", RUNGS)
def test_infinities_and_nan_are_those_of_the_formula(rung: str) -> None:
    x = torch.randn(10, 72)
    x[0] = -INF
    x[1, 5:] = -INF
    x[2, :71] = -INF
    x[3, 7] = INF
    x[4, 8], x[4, 9] = NAN, INF
    x[5, 70] = NAN
    x[6] = NAN
    x[7, ::2], x[7, 1] = -INF, NAN
    x[8] = 3e38
    x[9, :36], x[9, 36:] = -3e38, 3e38
    assert_close(by_rung(rung, x), formulas.softmax(x))
    # Where a probability is 0 its logarithm is still finite, unless the logit is not.
    assert_close(by_rung(rung, x, log=True), torch.log_softmax(x.double(), -1))


@pytest.mark.parametrize("rung", RUNGS)
def test_every_rung_applies_the_activation(rung: str) -> None:
    x = torch.randn(6, 24)
    for log in (False, True):
        y = (torch.log_softmax if log else torch.softmax)(x.double(), -1)
        for text, expected in (("x * 2 - 0.1", y * 2 - 0.1), ("relu(x - 0.05)", torch.relu(y - 0.05))):
            assert_close(by_rung(rung, x, log=log, activation=text), expected, 2e-7)
    assert not by_rung(rung, x, log=True, relu=True).any()
    if SoftmaxOperation.ladder.rung(rung).supports(SoftmaxProblem(1, 33_002)) is None:  # in two reads per row
        wide = torch.randn(1, 33_002)
        assert_close(by_rung(rung, wide, activation="sqrt(x)"), torch.softmax(wide.double(), -1).sqrt())


def by_rung(rung: str, x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return the softmax of rows; the rung `columns` reads them interleaved."""
    chosen = SoftmaxOperation.ladder.rung(rung)
    if rung != "columns":
        problem, x = SoftmaxProblem(len(x), x.shape[1], **options), x.contiguous()
    else:
        problem, x = SoftmaxProblem(1, x.shape[1], inner=len(x), **options), x.mT.contiguous()
    tensors = {"x": x, "y": torch.empty_like(x)}
    bind(chosen.recipe(problem, chosen.configs(problem)[0]), tensors)()
    return tensors["y"].mT if rung == "columns" else tensors["y"]


def test_infinities_in_a_row_too_wide_for_registers() -> None:
    x = torch.full((3, 40_001), -INF)
    x[1, 33_333] = 2.0
    x[2, 40_000] = INF
    assert_close(softmax(x), formulas.softmax(x))


@pytest.mark.share(7)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(7,), (2, 3, 50), (4, 1), (5, 1536)])
def test_it_agrees_with_pytorch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = (4 * torch.randn(shape)).to(dtype)
    y = softmax(x)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    assert_close(y, torch.softmax(x.float(), -1))


@pytest.mark.parametrize(
    ("rung", "problem"),
    [
        (rung, problem)
        for rung in RUNGS
        for problem in (
            *(SoftmaxProblem(2, classes) for classes in (72, 1000, 33_002)),
            SoftmaxProblem(2, 72, inner=3),
        )
        if SoftmaxOperation.ladder.rung(rung).supports(problem) is None
    ],
)
def test_the_result_may_take_the_place_of_the_input(rung: str, problem: SoftmaxProblem) -> None:
    x = random_inputs(problem, Draw(torch.device("cpu"), 0))["x"]
    expected = torch.softmax(x, 1)
    chosen = SoftmaxOperation.ladder.rung(rung)
    bind(chosen.recipe(problem, chosen.configs(problem)[0]), {"x": x, "y": x})()
    assert_close(x, expected)


def test_large_logits_do_not_overflow() -> None:
    x = torch.tensor([[60_000.0, 59_999.0, -60_000.0]])
    assert_close(softmax(x), formulas.softmax(x))


def test_what_it_refuses() -> None:
    with pytest.raises(UnsupportedError, match="torch.int64"):
        softmax(torch.ones(2, 3, dtype=torch.int64))
    with pytest.raises(UnsupportedError, match="softmax takes x: ... C"):
        softmax(torch.tensor(1.0))
    with pytest.raises(UnsupportedError, match="classes is 0"):
        softmax(torch.ones(2, 0))
    assert softmax(torch.ones(0, 3)).shape == (0, 3)


def test_gradients_are_those_of_pytorch() -> None:
    x = torch.randn(3, 40)
    mine, its = x.clone().requires_grad_(), x.clone().requires_grad_()
    gradient = torch.randn(3, 40)
    softmax(mine).backward(gradient)
    torch.softmax(its, -1).backward(gradient)
    torch.testing.assert_close(mine.grad, its.grad)


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.escalade.softmax.default, (torch.randn(3, 40),))
    torch.library.opcheck(torch.ops.escalade.softmax.default, (torch.randn(3, 40, requires_grad=True),))
