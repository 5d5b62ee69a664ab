"""Reductions as an operator: dimensions, expressions, messages, gradient, and non-finite values."""

from __future__ import annotations

import pytest
import torch

from escalade import ops
from escalade.device.run import TwinOptions, bind
from escalade.errors import UnsupportedError
from escalade.ops.base.rung import Rung
from escalade.ops.choose.choice import choose
from escalade.ops.reduce import REDUCE, ReduceProblem
from escalade.tune.verification import poisoned_workspaces
from tests.support import check, label

CPU = torch.device("cpu")


def test_a_range_of_dimensions() -> None:
    x = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(ops.reduce(x, "sum"), x.sum(-1))
    torch.testing.assert_close(ops.reduce(x, "max", 1, 2), x.amax((1, 2)))
    torch.testing.assert_close(ops.reduce(x, "var", 0, -1, correction=1.0), x.var())
    length = ops.reduce(x, "sum", 1, 1, before="x * x", activation="sqrt(x)")
    torch.testing.assert_close(length, torch.linalg.vector_norm(x, 2, 1))
    assert ops.reduce(x[:0], "mean", 1, 1).shape == (0, 4, 5)
    assert torch.equal(ops.reduce(x, "argmax", 1, 2), x.flatten(1, 2).argmax(1))
    assert torch.equal(ops.reduce(x, "argmin", 0, -1), x.argmin())


def test_the_gradient_is_pytorchs() -> None:
    x = torch.randn(3, 8)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    ops.reduce(leaves[0], "logsumexp").square().sum().backward()
    leaves[1].logsumexp(-1).square().sum().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[1].grad)


@pytest.mark.share(7)
@pytest.mark.parametrize("rung", REDUCE.ladder.rungs, ids=label)
@pytest.mark.parametrize("kind", ["sum", "max", "min", "var", "logsumexp"])
def test_what_is_not_finite_stays_in_its_result(rung: Rung[ReduceProblem], kind: str) -> None:
    x = torch.randn(4, 24)
    x[0, 3], x[1, 5], x[2, 7] = torch.nan, torch.inf, -torch.inf
    given, dim = (x, -1) if rung.name != "columns" else (x.T.contiguous(), 0)
    y = ops.reduce(given, kind, dim, dim, rung=rung.name)
    expected = {"sum": x.sum(1), "max": x.amax(1), "min": x.amin(1), "var": x.var(1, correction=0),
                "logsumexp": x.logsumexp(1)}[kind]  # fmt: skip
    torch.testing.assert_close(y, expected, equal_nan=True)


def test_a_logsumexp_of_nothing_likely_is_minus_infinity() -> None:
    x = torch.full((2, 40), -torch.inf)
    assert ops.reduce(x, "logsumexp").eq(-torch.inf).all()


@pytest.mark.share(7)
@pytest.mark.parametrize("rung", REDUCE.ladder.rungs, ids=label)
@pytest.mark.parametrize("kind", ["argmax", "argmin"])
@pytest.mark.parametrize("reduced", [21, 20000])
def test_an_index_is_that_of_the_first_extreme(rung: Rung[ReduceProblem], kind: str, reduced: int) -> None:
    """As in PyTorch, NaN is the extreme of both kinds, and zeros are equal whatever their signs."""
    x = torch.randn(9, reduced).mul(2).round().clamp(-3, 3)
    x[0, 3], x[0, 7] = torch.nan, torch.nan
    x[1, 5], x[1, 9], x[2, 4], x[2, 20] = torch.inf, torch.inf, -torch.inf, -torch.inf
    x[3], x[4], x[5] = torch.inf, -torch.inf, torch.nan
    x[6] = 0.0
    x[6, ::2] = -0.0
    x[7, reduced - 1] = torch.nan
    on_columns = rung.name == "columns"
    problem = ReduceProblem(kind, 1, reduced, 9) if on_columns else ReduceProblem(kind, 9, reduced)
    given = x.T.contiguous() if on_columns else x
    configs = rung.configs(problem)
    assert (
        rung.name == "naive"
        or reduced == 21
        or any(len(rung.recipe(problem, one).steps) == 2 for one in configs)
    )
    expected = getattr(torch, kind)(x, 1)
    for config in configs:
        y = torch.full((9,), -1)
        recipe = rung.recipe(problem, config)
        bind(recipe, {"x": given, "y": y, **poisoned_workspaces(recipe, CPU)}, problem.name, TwinOptions())()
        assert torch.equal(y, expected), config


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(UnsupportedError, match="argmin takes no expressions"):
        ops.reduce(torch.randn(2, 8), "argmin", before="x * x")
    with pytest.raises(UnsupportedError, match="kind 'median'"):
        ops.reduce(torch.randn(2, 8), "median")
    with pytest.raises(UnsupportedError, match="dimensions 1 to 0 of 2"):
        ops.reduce(torch.randn(2, 8), "sum", 1, 0)
    with pytest.raises(UnsupportedError, match="it must be one expression in x"):
        ops.reduce(torch.randn(2, 8), "sum", before="x * z")
    with pytest.raises(UnsupportedError, match="correction is 1.0"):
        ops.reduce(torch.randn(2, 8), "sum", correction=1.0)
    with pytest.raises(UnsupportedError, match="the form is"):
        ReduceProblem.parse("sum_96")


def test_few_results_are_shared_by_blocks() -> None:
    for name in ("sum_802816x1_b32", "var_100352x64_b1"):
        problem = ReduceProblem.parse(name)
        choice = choose(REDUCE, problem, CPU)
        assert len(choice.rung.recipe(problem, choice.config).steps) == 2
    many = ReduceProblem.parse("mean_96x1_b100352")
    config = choose(REDUCE, many, CPU).config.as_dict()
    assert config["row_threads"] < 32 and config["splits"] == 1


def test_columns_that_fill_the_card_take_one_launch() -> None:
    rung = REDUCE.ladder.rung("columns")
    for name, dtype, expected in (
        ("sum_64x4096_b1024", "fp32", (128, 4, 32)),
        ("sum_64x4096_b16", "fp32", (128, 4, 32)),
        ("sum_64x4096_b2", "fp32", (256, 2, 8)),  # wider CTAs would leave SMs idle
        ("max_256x1024_b16", "fp32", (256, 4, 16)),  # 128 threads would read 32 rows each
    ):
        config = rung.configs(ReduceProblem.parse(name, dtype))[0].as_dict()
        assert config["splits"] == 1
        assert (config["threads"], config["packs"], config["width"]) == expected, name


@pytest.mark.share(7)
@pytest.mark.parametrize("kind", ["sum", "var", "logsumexp"])
@pytest.mark.parametrize(("reduced", "inner"), [(70, 7), (67, 40), (5, 264), (600, 3)])
def test_every_width_of_columns(reduced: int, inner: int, kind: str, seed: int) -> None:
    problem = ReduceProblem(kind, 2, reduced, inner, dtype="fp16")
    rung = REDUCE.ladder.rung("columns")
    for config in rung.configs(problem):
        check(REDUCE, rung, problem, config, CPU, seed, TwinOptions(checks=True))


@pytest.mark.share(7)
@pytest.mark.parametrize("kind", ["sum", "var"])
@pytest.mark.parametrize(("batch", "reduced"), [(37, 64), (300, 24), (19, 100), (5, 1000)])
def test_every_split_of_rows_over_threads(batch: int, reduced: int, kind: str, seed: int) -> None:
    problem = ReduceProblem(kind, batch, reduced, dtype="fp16")
    rung = REDUCE.ladder.rung("rows")
    for config in rung.configs(problem):
        check(REDUCE, rung, problem, config, CPU, seed)


def test_short_rows_are_read_by_whole_lines() -> None:
    config = REDUCE.ladder.rung("rows").configs(ReduceProblem("sum", 1 << 20, 64, dtype="fp16"))[0].as_dict()
    assert (config["row_threads"], config["packs"], config["rows"]) == (8, 1, 2)


def test_adjacent_threads_store_adjacent_indices() -> None:
    """Two int64 each; over few elements no thread merges with another."""
    rung = REDUCE.ladder.rung("columns")
    few, many = (ReduceProblem("argmax", 8, reduced, 262_144, dtype="fp16") for reduced in (21, 64))
    config = rung.configs(few)[0].as_dict()
    assert config["access"] == 4 and config["threads"] == config["width"]
    assert rung.configs(many)[0].as_dict()["access"] == 16
    whole = ReduceProblem("max", 8, 21, 262_144, dtype="fp16")
    assert {one.as_dict()["access"] for one in rung.configs(whole)} == {16}


def test_an_index_has_no_gradient() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    index = ops.reduce(x, "argmax")
    assert index.dtype == torch.int64 and not index.requires_grad and torch.equal(index, x.argmax(1))
