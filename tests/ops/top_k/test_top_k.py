"""top_k: the order of classes, its verification, and agreement with PyTorch as an operator."""

from __future__ import annotations

import math

import pytest
import torch

from escalade.errors import UnsupportedError
from escalade.ops import top_k
from escalade.ops.base.accuracy import relative_error
from escalade.ops.top_k import TopKOperation, TopKProblem, exact
from tests import formulas

CPU = torch.device("cpu")
INF, NAN = float("inf"), float("nan")
RUNGS = [rung.name for rung in TopKOperation.ladder]


def ranked(row: list[float], k: int) -> list[int]:
    """NaN first, then the largest; of equal logits the lower class."""

    def key(at: int) -> tuple[bool, float, int]:
        return (False, 0.0, at) if math.isnan(row[at]) else (True, -row[at], at)

    return sorted(range(len(row)), key=key)[:k]


def assert_ranked(x: torch.Tensor, k: int, rung: str | None = None) -> None:
    probabilities, classes = top_k(x, k, rung=rung)
    rows = x.reshape(-1, x.shape[-1])
    expected = torch.tensor([ranked(row, k) for row in rows.double().tolist()])
    assert torch.equal(classes.reshape(-1, k), expected)
    its = formulas.softmax(rows).gather(-1, expected)
    torch.testing.assert_close(
        probabilities.reshape(-1, k), its.float(), rtol=1e-5, atol=1e-12, equal_nan=True
    )


def test_the_reference_ranks_alike() -> None:
    """For verification: ties and zeros of either sign."""
    x = torch.randint(-2, 3, (6, 331)).float() * 0.0 + torch.randint(-2, 3, (6, 331))
    x[:, ::7] *= -1.0
    found = exact(TopKProblem(6, 331, 5), {"x": x})
    assert found[:, 5:].tolist() == [ranked(row, 5) for row in x.tolist()]


def test_names_and_sizes() -> None:
    problem = TopKProblem.parse("1000_k5_b32", "fp16")
    assert problem == TopKProblem(32, 1000, 5, "fp16") and problem.name == "1000_k5_b32"
    assert problem.bytes == 32 * (2 * 1000 + 4 * 10)
    with pytest.raises(UnsupportedError, match="the form is"):
        TopKProblem.parse("1000_b32")
    with pytest.raises(UnsupportedError, match="and at most the number of classes"):
        TopKProblem(1, 4, 5)
    with pytest.raises(UnsupportedError, match="k is 33"):
        TopKProblem(1, 1000, 33)
    with pytest.raises(UnsupportedError, match="16777215 at most"):
        TopKProblem(1, 2**24, 5)


@pytest.mark.share(7)
@pytest.mark.parametrize("rung", RUNGS)
@pytest.mark.parametrize("k", [1, 5, 32])
def test_of_equal_logits_the_lower_class_comes_first(rung: str, k: int) -> None:
    assert_ranked(torch.randint(0, 4, (6, 331)).float(), k, rung)
    assert_ranked(torch.zeros(2, 64), k, rung)


@pytest.mark.parametrize("rung", RUNGS)
def test_zeros_of_either_sign_are_equal(rung: str) -> None:
    x = torch.zeros(1, 40)
    x[0, ::2] = -0.0
    assert_ranked(x, 5, rung)


@pytest.mark.parametrize("rung", RUNGS)
def test_nan_and_infinities_have_their_places(rung: str) -> None:
    x = torch.randn(6, 96)
    x[0, 70], x[0, 90], x[0, 3] = NAN, -NAN, INF
    x[1, 40], x[1, 41] = INF, INF
    x[2] = -INF
    x[3, 3:] = -INF
    x[4] = NAN
    x[5, :95] = -INF
    assert_ranked(x, 5, rung)


@pytest.mark.share(7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (2, 3, 50), (1, 5000)])
def test_it_agrees_with_pytorch(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert_ranked((3 * torch.randn(shape)).to(dtype), 5)


def test_verification_sees_a_wrong_class_and_a_wrong_probability() -> None:
    for problem in (*TopKOperation.problems, *TopKOperation.small_problems):
        if problem.k == problem.classes:
            continue
        inputs = TopKOperation().inputs(problem, CPU, 0)
        expected = TopKOperation().reference(problem, inputs)
        limit = TopKOperation.ladder.rung("naive").tolerance(
            problem, relative_error(TopKOperation().peer(problem, inputs), expected)
        )
        for wrong in (expected.clone(), expected.clone()):
            wrong[0, problem.k] += 1
            wrong[:, : problem.k] *= 1.001
            assert relative_error(wrong, expected) > limit
            wrong[0, problem.k] -= 1
            assert relative_error(wrong, expected) > limit


def test_what_it_refuses() -> None:
    with pytest.raises(UnsupportedError, match="top_k supports 1 to 32"):
        top_k(torch.ones(2, 100), 33)
    with pytest.raises(UnsupportedError, match="k is 0"):
        top_k(torch.ones(2, 100), 0)
    with pytest.raises(UnsupportedError, match="torch.float64"):
        top_k(torch.ones(2, 100).double(), 1)
    with pytest.raises(UnsupportedError, match="and at most the number of classes"):
        top_k(torch.ones(2, 3), 4)
    probabilities, classes = top_k(torch.ones(0, 3), 2)
    assert probabilities.shape == classes.shape == (0, 2)


def test_gradients_are_those_of_pytorch() -> None:
    x = torch.randn(3, 40)
    mine, its = x.clone().requires_grad_(), x.clone().requires_grad_()
    gradient = torch.randn(3, 5)
    top_k(mine, 5)[0].backward(gradient)
    torch.softmax(its, -1).topk(5).values.backward(gradient)
    torch.testing.assert_close(mine.grad, its.grad)


def test_opcheck() -> None:
    torch.library.opcheck(torch.ops.escalade.top_k.default, (torch.randn(3, 40), 5))
    torch.library.opcheck(torch.ops.escalade.top_k.default, (torch.randn(3, 40, requires_grad=True), 5))
