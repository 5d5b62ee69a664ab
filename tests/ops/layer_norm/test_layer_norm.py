"""Layer normalization as an operator: its messages, gradient, non-finite values, and dtypes of its tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade import ops
from escalade.device.run import TwinOptions, bind
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import DTYPES
from escalade.ops.base.operation import Operation
from escalade.ops.layer_norm import LAYER_NORM, LayerNormProblem
from escalade.ops.layer_norm_backward import LAYER_NORM_BACKWARD, LayerNormBackwardProblem
from tests.support import check


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 5), (4,), (0, 8)])
def test_rows_of_any_arrangement(shape: tuple[int, ...]) -> None:
    x, weight, bias = torch.randn(shape), torch.randn(shape[-1]), torch.randn(shape[-1])
    expected = F.layer_norm(x, shape[-1:], weight, bias, 1e-3)
    torch.testing.assert_close(ops.layer_norm(x, weight, bias, 1e-3), expected)
    torch.testing.assert_close(ops.layer_norm(x), F.layer_norm(x, shape[-1:]))


def test_the_gradient_is_pytorchs() -> None:
    given = [torch.randn(3, 8), torch.randn(8), torch.randn(8)]
    results = []
    for run in (lambda x, w, b: ops.layer_norm(x, w, b), lambda x, w, b: F.layer_norm(x, (8,), w, b)):
        leaves = [tensor.clone().requires_grad_() for tensor in given]
        run(*leaves).square().sum().backward()
        results.append([leaf.grad for leaf in leaves])
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("rung", [rung.name for rung in LAYER_NORM.ladder.rungs])
def test_a_row_that_is_not_finite_stays_alone(rung: str) -> None:
    x = torch.randn(4, 24)
    x[1, 3], x[2, 5] = torch.nan, torch.inf
    if rung == "columns":  # of adjacent rows
        chosen, problem = LAYER_NORM.ladder.rung(rung), LayerNormProblem(1, 24, False, False, inner=4)
        tensors = {"x": x.mT.contiguous(), "y": torch.empty(24, 4)}
        bind(chosen.recipe(problem, chosen.configs(problem)[0]), tensors)()
        y = tensors["y"].mT
    else:
        y = ops.layer_norm(x, rung=rung)
    assert y[1:3].isnan().all() and y[[0, 3]].isfinite().all()


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(UnsupportedError, match=r"weight is torch.float32 \[7\]"):
        ops.layer_norm(torch.randn(2, 8), torch.randn(7))
    with pytest.raises(UnsupportedError, match="epsilon"):
        ops.layer_norm(torch.randn(2, 8), epsilon=-1.0)
    with pytest.raises(UnsupportedError, match="the form is"):
        LayerNormProblem.parse("96")


def test_many_narrow_rows_leave_no_thread_idle() -> None:
    problem = LayerNormProblem(100_352, 96, dtype="fp16")
    config = LAYER_NORM.ladder.rung("in_registers").configs(problem)[0].as_dict()
    assert config["row_threads"] * config["packs"] == 12


@pytest.mark.share(7)
@pytest.mark.parametrize(
    ("rows", "features", "rms"),
    [(37, 64, False), (41, 64, True), (19, 44, False), (530, 24, False), (3, 520, False)],
)
def test_every_split_of_rows_over_threads(rows: int, features: int, rms: bool, seed: int) -> None:
    problem = LayerNormProblem(rows, features, rms=rms, bias=not rms, dtype="fp16")
    rung = LAYER_NORM.ladder.rung("in_registers")
    for config in rung.configs(problem):
        check(LAYER_NORM, rung, problem, config, torch.device("cpu"), seed, TwinOptions(checks=True))


@pytest.mark.parametrize(
    ("features", "dtype", "wide", "expected"),
    [
        (64, "fp16", False, (8, 1, 2)),
        (64, "fp16", True, (8, 1, 2)),
        (768, "fp16", False, (32, 3, 1)),
        (128, "fp32", False, (32, 1, 2)),
        (4096, "fp32", False, (512, 2, 1)),
        (3000, "fp32", False, (256, 3, 1)),
    ],
)
def test_many_rows_have_one_or_two_packs_per_thread(
    features: int, dtype: str, wide: bool, expected: tuple[int, int, int]
) -> None:
    problem = LayerNormProblem(65_536, features, dtype=dtype, wide=wide)
    config = LAYER_NORM.ladder.rung("in_registers").configs(problem)[0].as_dict()
    assert (config["row_threads"], config["packs"], config["rows"]) == expected


_TYPES = [(x, y) for x in DTYPES for y in DTYPES]


@pytest.mark.share(7)
@pytest.mark.parametrize(("x", "y"), _TYPES)
def test_results_of_any_dtype(x: str, y: str, seed: int) -> None:
    _check_all_configs(LAYER_NORM, LayerNormProblem(7, 88, wide=True, dtype=x, output=y), seed)


@pytest.mark.share(7)
@pytest.mark.parametrize("gradient", DTYPES)
@pytest.mark.parametrize(("x", "y"), _TYPES)
def test_gradients_of_any_dtype(x: str, y: str, gradient: str, seed: int) -> None:
    problem = LayerNormBackwardProblem(70, 88, dtype=x, output=y, gradient=gradient)
    _check_all_configs(LAYER_NORM_BACKWARD, problem, seed)


@pytest.mark.share(7)
@pytest.mark.parametrize("rounded", ["", *DTYPES])
@pytest.mark.parametrize(("x", "residual"), _TYPES)
def test_residuals_and_copies_of_any_dtype(x: str, residual: str, rounded: str, seed: int) -> None:
    problem = LayerNormBackwardProblem(70, 88, dtype=x, residual=residual, rounded=rounded)
    _check_all_configs(LAYER_NORM_BACKWARD, problem, seed)


def _check_all_configs(operation: Operation[Any], problem: Any, seed: int) -> None:
    assert operation.problem.parse(problem.name, problem.dtype) == problem
    for rung in operation.ladder.rungs:
        for config in rung.configs(problem) if rung.supports(problem) is None else ():
            check(operation, rung, problem, config, torch.device("cpu"), seed, TwinOptions(checks=True))


def test_dtypes_are_named_and_checked() -> None:
    problem = LayerNormBackwardProblem(
        6304, 768, gradient="fp16", output="bf16", residual="fp32", rounded="fp16"
    )
    assert problem.name == "768_b6304_weight_fromfp16_tobf16_plusfp32_andfp16"
    assert LayerNormBackwardProblem.parse(problem.name) == problem
    assert LayerNormBackwardProblem(4, 8, residual="fp32", rounded="fp16").bytes == 4 * 8 * 18 + 3 * 8 * 4
    assert LayerNormProblem(4, 8, output="fp16").bytes == 4 * 8 * (4 + 2) + 2 * 8 * 4
    assert LayerNormBackwardProblem(4, 8, gradient="fp16").bytes == 4 * 8 * (4 + 2 + 4) + 3 * 8 * 4
    with pytest.raises(UnsupportedError, match="int8"):
        LayerNormProblem(4, 8, output="int8")
    with pytest.raises(UnsupportedError, match="fp8"):
        LayerNormBackwardProblem(4, 8, gradient="fp8")
    with pytest.raises(UnsupportedError, match="residual.*tf32"):
        LayerNormBackwardProblem(4, 8, residual="tf32")
    with pytest.raises(UnsupportedError, match="stride 9.*cast the result"):
        LayerNormProblem(4, 8, inner=9, output="fp16")
    refusal = LAYER_NORM.ladder.rung("columns").supports(LayerNormProblem(4, 8, output="fp16"))
    assert refusal == "columns writes y in the dtype of x, fp32, not in fp16"


@pytest.mark.parametrize(
    ("operation", "problem"),
    [
        (LAYER_NORM, LayerNormProblem(9000, 768, dtype="fp16", output="fp32")),
        (LAYER_NORM, LayerNormProblem(9000, 768, output="fp16")),
        (LAYER_NORM_BACKWARD, LayerNormBackwardProblem(9000, 768, dtype="fp16", gradient="fp32")),
        (LAYER_NORM_BACKWARD, LayerNormBackwardProblem(9000, 768, dtype="bf16", output="fp32")),
        (LAYER_NORM_BACKWARD, LayerNormBackwardProblem(9000, 768, dtype="fp16", residual="fp32")),
    ],
)
def test_an_access_has_at_most_16_bytes_of_every_tensor(operation: Operation[Any], problem: Any) -> None:
    (config, *_) = operation.ladder.rung("in_registers").configs(problem)
    assert config.row_threads * config.packs == 768 // 4
