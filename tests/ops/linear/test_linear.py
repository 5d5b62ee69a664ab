"""linear: its problem, refusals, and agreement with PyTorch as an operator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade.device.run import bind
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, linear
from escalade.ops.base.card import H200
from escalade.ops.base.dtypes import STORAGE
from escalade.ops.choose.choice import choose
from escalade.ops.linear import LINEAR, LinearOperation, LinearProblem
from tests import formulas
from tests.support import check

CPU = torch.device("cpu")


def tensors(dtype: torch.dtype = torch.float32, rows: tuple[int, ...] = (3,)) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*rows, 40, generator=generator)
    weight = torch.randn(24, 40, generator=generator) / 40**0.5
    return [tensor.to(dtype) for tensor in (x, weight, torch.randn(24, generator=generator))]


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[result.dtype]
    torch.testing.assert_close(result, expected.to(result.dtype), rtol=tolerance, atol=tolerance)


def test_names_and_sizes() -> None:
    problem = LinearProblem.parse("512to1000_b32_bias+relu", "fp16")
    assert problem == LinearProblem(32, 512, 1000, True, True, "fp16")
    assert problem.name == "512to1000_b32_bias+relu"
    assert problem.flops == 2 * 32 * 512 * 1000
    assert problem.bytes == 2 * (32 * 512 + 512 * 1000 + 1000 + 32 * 1000)
    with pytest.raises(UnsupportedError, match="the form is"):
        LinearProblem.parse("512x1000")


def test_names_and_sizes_of_means() -> None:
    problem = LinearProblem.parse("512to1000_mean49_b2_bias", "fp16")
    assert problem == LinearProblem(2, 512, 1000, True, False, "fp16", pixels=49)
    assert problem.name == "512to1000_mean49_b2_bias"
    assert problem.flops == 2 * 2 * 512 * 1000 + 2 * 49 * 512
    assert problem.bytes == 2 * (2 * 49 * 512 + 512 * 1000 + 1000 + 2 * 1000)
    with pytest.raises(UnsupportedError, match="pixels is 0"):
        LinearProblem(1, 8, 8, pixels=0)


@pytest.mark.parametrize(
    ("problem", "rung"),
    [
        (LinearProblem(1, 512, 1000, dtype="fp16"), "warp_per_output"),
        (LinearProblem(16, 512, 1000), "warp_per_output"),
        (LinearProblem(32, 512, 1000), "tiled"),
        (LinearProblem(32, 512, 1000, dtype="bf16"), "tensor_core"),
        (LinearProblem(10_000, 1296, 32, dtype="tf32"), "tensor_core"),
        (LinearProblem(2**29, 40, 24, dtype="fp16"), "tensor_core"),
        (LinearProblem(33, 2**26, 64, dtype="fp16"), "tiled"),
        (LinearProblem(1, 512, 1000, dtype="fp16", pixels=49), "pooled"),
        (LinearProblem(2, 512, 1000, dtype="bf16", pixels=49), "pooled"),
        (LinearProblem(1, 512, 1000, pixels=49), "pooled"),
        (LinearProblem(2, 512, 1000, pixels=49), "pool_first"),
        (LinearProblem(3, 512, 1000, dtype="fp16", pixels=49), "pool_first"),
        (LinearProblem(1, 2048, 1000, dtype="fp16", pixels=49), "pool_first"),
        (LinearProblem(256, 512, 1000, dtype="fp16", pixels=49), "pool_first"),
        (LinearProblem(1, 8, 8, pixels=2**29), "naive"),
    ],
)
def test_the_choice(problem: LinearProblem, rung: str) -> None:
    assert choose(OPERATIONS["linear"], problem, CPU).rung.name == rung


def test_refusals_say_why() -> None:
    ladder = LinearOperation.ladder
    assert "up to 64 rows" in (ladder.rung("warp_per_output").supports(LinearProblem(65, 8, 8)) or "")
    refusal = ladder.rung("tensor_core").supports(LinearProblem(65, 2**26, 64, dtype="fp16")) or ""
    assert refusal.startswith("as a 1x1 convolution") and "4294967296" in refusal
    for rung in ("tiled", "warp_per_output", "tensor_core", "tensor_core_split"):
        assert "support means over pixels" in (
            ladder.rung(rung).supports(LinearProblem(1, 8, 8, pixels=4)) or ""
        )
    for rung in ("pool_first", "pooled"):
        assert "needs several pixels" in (ladder.rung(rung).supports(LinearProblem(1, 8, 8)) or "")
    pooled = ladder.rung("pooled")
    assert "up to 4 rows" in (pooled.supports(LinearProblem(5, 8, 8, pixels=4)) or "")
    assert "vectors of 1 do not fit" in (pooled.supports(LinearProblem(1, 513, 8, pixels=4)) or "")
    assert "4294967296" in (ladder.rung("pool_first").supports(LinearProblem(1, 8, 8, pixels=2**29)) or "")
    with pytest.raises(UnsupportedError, match=r"fewer than 2\^38"):
        LinearProblem(2**20, 8, 2**20)
    with pytest.raises(UnsupportedError, match=r"fewer than 2\^30"):
        LinearProblem(1, 2**30, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [(3,), (), (2, 5), (9, 1)])
def test_leading_dimensions_are_rows(dtype: torch.dtype, rows: tuple[int, ...]) -> None:
    x, weight, bias = tensors(dtype, rows)
    y = linear(x, weight, bias, relu=True)
    assert y.shape == (*rows, 24)
    assert_close(y, F.relu(F.linear(x.float(), weight.float(), bias.float())))


def test_views_are_taken_as_they_are_meant() -> None:
    x, weight, _ = tensors(rows=(6,))
    assert_close(linear(x[::2], weight), F.linear(x[::2], weight))
    assert_close(linear(x[:, :24], weight.T[:24, :24]), F.linear(x[:, :24], weight.T[:24, :24]))
    shifted = torch.cat((torch.zeros(1), x.flatten()))[1:].view_as(x)
    assert_close(linear(shifted, weight), F.linear(x, weight))


@pytest.mark.parametrize("rung", ["naive", "tiled", "warp_per_output"])
@pytest.mark.parametrize("relu", [False, True])
def test_nan_and_infinity_travel(rung: str, relu: bool) -> None:
    x, weight, bias = tensors()
    x[0, 3], x[1, 39], weight[5, 7], bias[9] = float("nan"), float("inf"), float("-inf"), float("nan")
    expected = formulas.product(x, weight, bias)
    expected = (formulas.relu(expected) if relu else expected).float()
    torch.testing.assert_close(linear(x, weight, bias, relu=relu, rung=rung), expected, equal_nan=True)


def means_by(rung: str, problem: LinearProblem, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    operation = LinearOperation()
    taken = operation.ladder.rung(rung)
    recipe = taken.recipe(problem, taken.configs(problem)[0])
    workspaces = {each.name: each.allocate(CPU) for each in recipe.workspaces}
    y = operation.output(problem, CPU)
    bind(recipe, {"bias": None, **inputs, **workspaces, "y": y}, rung)()
    return y


@pytest.mark.share(7)
@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("rung", ["naive", "pooled"])
def test_means_are_rounded_as_between_two_launches(rung: str, dtype: str) -> None:
    """Sums of small integers are exact in any order: only the means are rounded."""
    problem = LinearProblem(2, 72, 19, bias=True, dtype=dtype, pixels=49)
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(-8, 9, (2, 49, 72), generator=generator).to(STORAGE[dtype])
    inputs = {**LinearOperation().inputs(problem, CPU, 3), "x": x}
    torch.testing.assert_close(
        means_by(rung, problem, inputs), means_by("pool_first", problem, inputs), rtol=1e-6, atol=1e-6
    )
    identity = replace(problem, out_features=72, bias=False)
    rows = means_by(rung, identity, {"x": x, "weight": torch.eye(72, dtype=x.dtype)})
    assert torch.equal(rows, x.float().mean(1).to(x.dtype))


@pytest.mark.parametrize("rung", ["naive", "pool_first", "pooled"])
@pytest.mark.parametrize("relu", [False, True])
def test_nan_and_infinity_travel_through_means(rung: str, relu: bool) -> None:
    problem = LinearProblem(3, 40, 24, bias=True, relu=relu, pixels=5)
    inputs = LinearOperation().inputs(problem, CPU, 4)
    inputs["x"][0, 4, 3], inputs["x"][1, 0, 39] = float("nan"), float("inf")
    inputs["weight"][5, 7], inputs["bias"][9] = float("-inf"), float("nan")
    expected = formulas.product(formulas.mean(inputs["x"], (1,)), inputs["weight"], inputs["bias"])
    expected = (formulas.relu(expected) if relu else expected).float()
    torch.testing.assert_close(means_by(rung, problem, inputs), expected, equal_nan=True)


def test_no_rows_no_launch() -> None:
    x, weight, bias = tensors(rows=(0,))
    assert linear(x, weight, bias).shape == (0, 24)
    with pytest.raises(UnsupportedError, match="no rung 'nonsense'"):
        linear(x, weight, rung="nonsense")


@pytest.mark.parametrize(
    ("x", "weight", "options", "sentence"),
    [
        (torch.ones(2, 8), torch.ones(4, 9), {}, "weight is .* here I is 8"),
        (torch.ones(()), torch.ones(4, 8), {}, "linear takes x: ... I"),
        (torch.ones(2, 8), torch.ones(8), {}, "weight: O I"),
        (torch.ones(2, 8).double(), torch.ones(4, 8).double(), {}, "torch.float64.*float32, float16"),
        (torch.ones(2, 8), torch.ones(4, 8).half(), {}, "weight is torch.float16 .*of one dtype"),
        (torch.ones(2, 8), torch.ones(4, 8, device="meta"), {}, "weight is .* on meta"),
        (
            torch.ones(2, 8),
            torch.ones(4, 8),
            {"bias": torch.ones(8)},
            r"bias is torch.float32 \[8\].* here O is 4",
        ),
        (torch.ones(2, 8).half(), torch.ones(4, 8).half(), {"tf32": True}, "tf32=True applies"),
        (torch.ones(2, 0), torch.ones(4, 0), {}, "in_features is 0"),
    ],
)
def test_tensors_that_pose_no_problem(
    x: torch.Tensor, weight: torch.Tensor, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        linear(x, weight, **options)


@pytest.mark.parametrize("relu", [False, True])
def test_gradients_are_those_of_pytorch(relu: bool) -> None:
    given = tensors(rows=(2, 3))
    ours = [tensor.clone().requires_grad_() for tensor in given]
    theirs = [tensor.clone().requires_grad_() for tensor in given]
    expected = F.linear(*theirs)
    expected = F.relu(expected) if relu else expected
    gradient = torch.randn_like(expected)
    linear(*ours, relu=relu).backward(gradient)
    expected.backward(gradient)
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.grad is not None and its.grad is not None
        assert_close(mine.grad, its.grad)


def test_autocast() -> None:
    x, weight, bias = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear(x, weight, bias, tf32=True)
    assert y.dtype == torch.bfloat16
    assert_close(y, F.linear(x, weight, bias))


def test_opcheck() -> None:
    x, weight, bias = tensors()
    needs = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
    torch.library.opcheck(torch.ops.escalade.linear.default, (x, weight))
    torch.library.opcheck(torch.ops.escalade.linear.default, (*needs, True))


@pytest.mark.share(7)
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 2096, 40), (3, 64, 16), (8, 1032, 33), (19, 1160, 37), (32, 40, 70)]
)
def test_streamed_weights_meet_every_row(rows: int, inputs: int, outputs: int, dtype: str, seed: int) -> None:
    problem = LinearProblem(rows, inputs, outputs, bias=rows > 1, relu=rows == 3, dtype=dtype)
    rung = LINEAR.ladder.rung("streamed")
    for config in rung.configs(problem):
        check(LINEAR, rung, problem, config, CPU, seed)


def test_large_weights_are_streamed_for_a_few_rows() -> None:
    found = {
        rows: choose(LINEAR, LinearProblem(rows, 4096, 4096, dtype="fp16"), H200).rung.name
        for rows in (1, 32, 33)
    }
    assert found == {1: "streamed", 32: "streamed", 33: "tensor_core"}
    small = LinearProblem(4, 1024, 2048, dtype="fp16")
    assert choose(LINEAR, small, H200).rung.name == "warp_per_output"


def test_what_is_not_finite_stays_in_its_row_and_output() -> None:
    x, weight = torch.randn(3, 72).half(), torch.randn(18, 72).half()
    x[1, 70], weight[4, 3] = torch.inf, torch.nan
    y = linear(x, weight, rung="streamed")
    assert y[:, 4].isnan().all() and not y[1].isfinite().any()
    assert torch.cat((y[[0, 2], :4], y[[0, 2], 5:]), 1).isfinite().all()
