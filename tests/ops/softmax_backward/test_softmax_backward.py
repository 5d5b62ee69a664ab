"""softmax_backward: its problem, dtypes, non-finite rows, results in place, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from escalade.device.run import TwinOptions, bind
from escalade.errors import UnsupportedError
from escalade.ops.base.card import H200
from escalade.ops.base.draw import Draw
from escalade.ops.base.dtypes import DTYPES
from escalade.ops.softmax_backward import (
    SOFTMAX_BACKWARD,
    SoftmaxBackwardOperation,
    SoftmaxBackwardProblem,
    exact,
    random_inputs,
)
from tests.support import check

RUNGS = [rung.name for rung in SoftmaxBackwardOperation.ladder]
INF = float("inf")


def test_names_and_sizes() -> None:
    problem = SoftmaxBackwardProblem(32, 67, inner=40, log=True, gradient="fp16", output="bf16")
    assert problem.name == "67_b32_inner40_log_fromfp16_tobf16"
    assert SoftmaxBackwardProblem.parse(problem.name) == problem
    assert problem.bytes == (4 + 2 + 2) * 32 * 67 * 40
    assert SoftmaxBackwardProblem(3, 5, "fp16").bytes == 3 * 2 * 3 * 5
    with pytest.raises(UnsupportedError, match="gradient.*tf32"):
        SoftmaxBackwardProblem(1, 1, gradient="tf32")
    with pytest.raises(UnsupportedError, match="classes is 0"):
        SoftmaxBackwardProblem(1, 0)


def test_rows_that_fit_nowhere_are_refused() -> None:
    def refusal(rung: str, problem: SoftmaxBackwardProblem) -> str | None:
        return SoftmaxBackwardOperation.ladder.rung(rung).supports(problem)

    assert refusal("in_registers", SoftmaxBackwardProblem(1, 16_384)) is None
    assert refusal("in_registers", SoftmaxBackwardProblem(1, 16_400)) == (
        "rows of up to 16384 classes fit into registers; these have 16400"
    )
    assert "needs contiguous rows" in str(refusal("in_registers", SoftmaxBackwardProblem(1, 8, inner=2)))
    assert refusal("columns", SoftmaxBackwardProblem(1, 512, inner=3)) is None
    assert "up to 512 elements" in str(refusal("columns", SoftmaxBackwardProblem(1, 513, inner=3)))


@pytest.mark.parametrize(
    ("classes", "dtype", "expected"),
    [(64, "fp16", (8, 1)), (256, "fp16", (32, 1)), (1024, "fp16", (64, 2)), (4096, "fp32", (512, 2))],
)
def test_many_rows_have_one_or_two_packs_per_thread(
    classes: int, dtype: str, expected: tuple[int, int]
) -> None:
    rung = SoftmaxBackwardOperation.ladder.rung("in_registers").on(H200)
    config = rung.configs(SoftmaxBackwardProblem(65_536, classes, dtype))[0].as_dict()
    assert (config["row_threads"], config["packs"]) == expected


def test_an_access_has_at_most_16_bytes_of_every_tensor() -> None:
    problem = SoftmaxBackwardProblem(9000, 768, dtype="fp16", gradient="fp32")
    (config, *_) = SoftmaxBackwardOperation.ladder.rung("in_registers").configs(problem)
    assert config.as_dict()["row_threads"] * config.as_dict()["packs"] == 768 // 4


@pytest.mark.share(7)
@pytest.mark.parametrize("inner", [1, 12])
@pytest.mark.parametrize("gradient", DTYPES)
@pytest.mark.parametrize(("y", "dx"), [(y, dx) for y in DTYPES for dx in DTYPES])
def test_tensors_of_any_dtype(y: str, dx: str, gradient: str, inner: int, seed: int) -> None:
    problem = SoftmaxBackwardProblem(35, 40, dtype=y, inner=inner, gradient=gradient, output=dx)
    for rung in SoftmaxBackwardOperation.ladder:
        for config in rung.configs(problem) if rung.supports(problem) is None else ():
            check(
                SOFTMAX_BACKWARD, rung, problem, config, torch.device("cpu"), seed, TwinOptions(checks=True)
            )


def by_rung(rung: str, inputs: dict[str, torch.Tensor], **options: Any) -> torch.Tensor:
    """Return dx of rows; the rung `columns` reads them interleaved."""
    is_strided = rung == "columns"
    rows, classes = inputs["softmax"].shape
    batch, inner = (1, rows) if is_strided else (rows, 1)
    problem = SoftmaxBackwardProblem(batch, classes, inner=inner, **options)
    tensors = {name: (one.mT if is_strided else one).contiguous() for name, one in inputs.items()}
    tensors["y"] = torch.empty_like(tensors["softmax"])
    chosen = SoftmaxBackwardOperation.ladder.rung(rung)
    bind(chosen.recipe(problem, chosen.configs(problem)[0]), tensors)()
    return tensors["y"].mT if is_strided else tensors["y"]


@pytest.mark.parametrize("rung", RUNGS)
def test_a_row_that_is_not_finite_stays_alone(rung: str) -> None:
    inputs = random_inputs(SoftmaxBackwardProblem(4, 72), Draw(torch.device("cpu"), 0))
    inputs["gradient"][1, 3], inputs["softmax"][2, 5] = INF, torch.nan
    dx = by_rung(rung, inputs)
    assert not dx[1:3].isfinite().any() and dx[[0, 3]].isfinite().all()


@pytest.mark.parametrize("rung", RUNGS)
def test_classes_without_probability_have_their_own_gradient(rung: str) -> None:
    x, gradient = torch.randn(4, 72), torch.randn(4, 72)
    x[:, 10:60] = -INF
    y = torch.log_softmax(x, -1)
    dx = by_rung(rung, {"gradient": gradient, "softmax": y}, log=True)
    torch.testing.assert_close(dx[:, 10:60], gradient[:, 10:60], rtol=0, atol=0)
    expected = torch.ops.aten._log_softmax_backward_data(gradient, y, -1, torch.float32)
    torch.testing.assert_close(dx, expected)
    assert not by_rung(rung, {"gradient": gradient, "softmax": y.exp()})[:, 10:60].any()


@pytest.mark.parametrize(
    ("rung", "problem"),
    [
        (rung, problem)
        for rung in RUNGS
        for problem in (
            *(SoftmaxBackwardProblem(5, classes) for classes in (72, 1000, 1001)),
            SoftmaxBackwardProblem(37, 49, "fp16"),
            SoftmaxBackwardProblem(2, 72, inner=3),
            SoftmaxBackwardProblem(2, 9, inner=40, gradient="fp16", output="fp16"),
        )
        if SoftmaxBackwardOperation.ladder.rung(rung).supports(problem) is None
    ],
)
def test_the_result_may_take_the_place_of_the_gradient(rung: str, problem: SoftmaxBackwardProblem) -> None:
    inputs = random_inputs(problem, Draw(torch.device("cpu"), 0))
    expected = exact(problem, inputs)
    chosen = SoftmaxBackwardOperation.ladder.rung(rung)
    for config in chosen.configs(problem):
        tensors = {**inputs, "gradient": inputs["gradient"].clone()}
        bind(chosen.recipe(problem, config), {**tensors, "y": tensors["gradient"]})()
        torch.testing.assert_close(tensors["gradient"].double(), expected, rtol=2e-3, atol=2e-4)
