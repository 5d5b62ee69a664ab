"""ReLU: bounds, NaN, in place, strides, gradients, and refusals."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade.device.recipe import KernelCall
from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Order
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, relu, relu_
from escalade.ops.relu import ReluProblem
from escalade.ops.shared.pointwise import PacksConfig
from tests import formulas

SPECIAL = [float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 6.0, 6.5, -1.5, 1e-8]


def expected(x: torch.Tensor, limit: float | None) -> torch.Tensor:
    return formulas.relu(x, math.inf if limit is None else limit).to(x.dtype)


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same, misaligned to 16 bytes."""
    return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view_as(tensor)


STRIDED = {
    "channels_last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "sliced": lambda x: x[:, 1:, ::2],
    "not aligned": shifted,
    "no dimensions": lambda x: x[0, 0, 0, 0],
    "empty": lambda x: x[:0],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("limit", [None, 6.0])
def test_nan_infinities_and_bounds(dtype: torch.dtype, limit: float | None) -> None:
    x = torch.tensor(SPECIAL * 5, dtype=dtype)
    torch.testing.assert_close(relu(x, limit), expected(x, limit), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        relu(x, limit, rung="naive"), expected(x, limit), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("make", STRIDED.values(), ids=list(STRIDED))
@pytest.mark.parametrize("in_place", [False, True])
def test_any_strides(make: Any, in_place: bool, seed: int) -> None:
    x = make(torch.randn(3, 5, 4, 7, generator=torch.Generator().manual_seed(seed)))
    wanted = F.relu(x)
    if in_place:
        y = x.clone() if x.numel() == 0 else x
        assert relu_(y) is y
    else:
        before = x.clone()
        y = relu(x)
        assert torch.equal(x, before)
        assert y.stride() == torch.empty_like(x).stride()
    assert torch.equal(y, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("limit", [None, 6.0])
def test_in_place_leaves_the_neighbours_alone(dtype: torch.dtype, limit: float | None, seed: int) -> None:
    memory = torch.randn(1024, generator=torch.Generator().manual_seed(seed)).mul_(5).to(dtype)
    wanted = memory.clone()
    wanted[16:1001] = expected(wanted[16:1001], limit)
    version = memory._version
    relu_(memory[16:1001], limit)
    assert torch.equal(memory, wanted)
    assert memory._version > version, "autograd would not see the change"


@pytest.mark.parametrize("rung", ["naive", "vectorised"])
@pytest.mark.parametrize("elements", [1, 9001])
def test_recipes_run_in_place(rung: str, elements: int, seed: int) -> None:
    """y is x, with threads and CTAs in any order."""
    operation = OPERATIONS["relu"]
    problem = ReluProblem(elements, 6.0, "fp16")
    x = operation.inputs(problem, torch.device("cpu"), seed)["x"]
    wanted = expected(x, 6.0)
    one = operation.ladder.rung(rung)
    options = TwinOptions(order=Order(seed=seed))
    bind(one.recipe(problem, one.configs(problem)[0]), {"x": x, "y": x}, options=options)()
    assert torch.equal(x, wanted)


@pytest.mark.parametrize("elements", [4096, 4096 * 4 + 5])
def test_several_packs_a_thread(elements: int, seed: int) -> None:
    operation = OPERATIONS["relu"]
    problem = ReluProblem(elements, None, "bf16")
    x = operation.inputs(problem, torch.device("cpu"), seed)["x"]
    y = torch.full_like(x, float("nan"))
    bind(operation.ladder.rung("vectorised").recipe(problem, PacksConfig(128, 4)), {"x": x, "y": y})()
    assert torch.equal(y, F.relu(x))


@pytest.mark.parametrize("limit", [None, 1.0])
def test_gradients_pass_between_the_bounds_and_at_a_nan(limit: float | None, seed: int) -> None:
    x = torch.randn(5, 33, generator=torch.Generator().manual_seed(seed))
    x[0, :3] = torch.tensor([0.0, 1.0, float("nan")])
    mine = x.clone().requires_grad_()
    gradient = torch.randn_like(x)
    relu(mine, limit).backward(gradient)
    passes = (x > 0) & (x < (math.inf if limit is None else limit)) | x.isnan()
    assert mine.grad is not None
    assert torch.equal(mine.grad, torch.where(passes, gradient, 0.0))


def test_no_gradient_passes_a_limit_that_is_rounded() -> None:
    """Neither fp16 nor bf16 has 0.3 or 1.3: both round 1.3 down, so a result at the limit is below the limit."""
    for dtype, limit in itertools.product((torch.float32, torch.float16, torch.bfloat16), (0.3, 1.3)):
        x = torch.tensor([-1.0, 0.05, 100.0], dtype=dtype).requires_grad_()
        relu(x, limit).sum().backward()
        assert x.grad is not None and x.grad.tolist() == [0.0, 1.0, 0.0], f"{dtype}, {limit}"


def test_in_place_has_no_gradient_and_says_so() -> None:
    x = torch.randn(10).requires_grad_()
    with pytest.raises(UnsupportedError, match="requires grad; use relu"):
        relu_(x * 2)
    with torch.no_grad():
        assert torch.equal(relu_(x.clone()), F.relu(x))
    with torch.inference_mode():
        assert torch.equal(relu_(torch.full((5,), -1.0)), torch.zeros(5))


@pytest.mark.parametrize(
    ("x", "limit", "sentence"),
    [
        (torch.ones(3).double(), None, "x is torch.float64.*float32, float16 (and|or) bfloat16"),
        (torch.ones(3).int(), None, "x is torch.int32"),
        (torch.ones(3), 0.0, "it must be positive and finite"),
        (torch.ones(3), float("nan"), "it must be positive and finite"),
        (torch.ones(3), float("inf"), "it must be positive and finite"),
    ],
)
def test_what_it_refuses(x: torch.Tensor, limit: float | None, sentence: str) -> None:
    for function in (relu, relu_):
        with pytest.raises(UnsupportedError, match=sentence):
            function(x, limit)


def test_in_place_refuses_shared_memory_and_unknown_rungs() -> None:
    with pytest.raises(UnsupportedError, match="share memory"):
        relu_(torch.ones(1).expand(4))
    with pytest.raises(UnsupportedError, match="no rung 'fastest'"):
        relu(torch.ones(0), rung="fastest")


def test_names() -> None:
    assert ReluProblem(802_816).name == "relu_802816"
    assert ReluProblem(802_816, 6.0).name == "relu6_802816"
    assert ReluProblem(7, 0.25).name == "relu0.25_7"
    for limit in (None, 6.0, 0.1, 1e-7, 3e20):
        problem = ReluProblem(12, limit)
        assert ReluProblem.parse(problem.name) == problem
    with pytest.raises(UnsupportedError, match="does not name a rectifier"):
        ReluProblem.parse("relu")
    for wrong in ({"elements": -1}, {"dtype": "fp8"}, {"layout": "nchw"}, {"batch": 2}):
        with pytest.raises(UnsupportedError):
            replace(ReluProblem(5), **wrong)


def test_a_limit_may_be_an_integer() -> None:
    rung = OPERATIONS["relu"].ladder.rung("vectorised")
    assert rung.recipe(ReluProblem(9, 6), PacksConfig()) == rung.recipe(ReluProblem(9, 6.0), PacksConfig())


def test_sizes_beyond_32_bits_fit_a_launch() -> None:
    problem = ReluProblem(3 * 2**31 + 5, dtype="fp16")
    for rung in OPERATIONS["relu"].ladder:
        (call,) = rung.recipe(problem, rung.configs(problem)[0]).steps
        assert isinstance(call, KernelCall) and call.grid[0] < 2**31


@pytest.mark.parametrize("limit", [None, 6.0])
def test_opcheck(limit: float | None) -> None:
    torch.library.opcheck(torch.ops.escalade.relu.default, (torch.randn(4, 5), limit))
    torch.library.opcheck(torch.ops.escalade.relu.default, (torch.randn(4, 5).requires_grad_(), limit))
    torch.library.opcheck(torch.ops.escalade.relu_.default, (torch.randn(4, 5), limit))


def test_torch_compile_takes_both_forms() -> None:
    torch._dynamo.reset()

    def work(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        relu_(y, 1.5)
        return relu(y - 1) + y

    x = torch.randn(6, 7)
    compiled = torch.compile(work, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), work(x))
