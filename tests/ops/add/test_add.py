"""The sum of two tensors: NaN, aliases, strides, gradients, and refusals."""

from __future__ import annotations

import pytest
import torch

from escalade.device.run import TwinOptions, bind
from escalade.device.twin import Order
from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, add
from escalade.ops.add import AddProblem
from escalade.ops.shared.pointwise import PacksConfig
from tests import formulas


def plain(x: torch.Tensor, residual: torch.Tensor, relu: bool) -> torch.Tensor:
    """Rounded once: the sum of two numbers is exact in float64, or nearly."""
    y = x.double() + residual.double()
    return (formulas.relu(y) if relu else y).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("relu", [False, True])
def test_the_sum_is_rounded_once(dtype: torch.dtype, relu: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(2, 3, 5, 7, generator=generator).to(dtype) for _ in range(2))
    x.view(-1)[:4] = torch.tensor([float("nan"), float("inf"), float("-inf"), float("inf")])
    residual.view(-1)[2:5] = torch.tensor([float("inf"), 1.0, float("nan")])
    torch.testing.assert_close(
        add(x, residual, relu=relu), plain(x, residual, relu), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("rung", ["naive", "vectorised"])
@pytest.mark.parametrize("over", ["x", "residual", "both"])
def test_recipes_run_in_place(rung: str, over: str, seed: int) -> None:
    """y aliases x, or the residual, or all three are the same; with threads and CTAs in any order."""
    operation = OPERATIONS["add"]
    problem = AddProblem(9001, relu=True, dtype="fp16")
    inputs = operation.inputs(problem, torch.device("cpu"), seed)
    if over == "both":
        inputs["residual"] = inputs["x"]
    wanted = plain(inputs["x"], inputs["residual"], True)
    y = inputs["x" if over == "both" else over]
    one = operation.ladder.rung(rung)
    options = TwinOptions(order=Order(seed=seed))
    bind(one.recipe(problem, one.configs(problem)[0]), {**inputs, "y": y}, options=options)()
    assert torch.equal(y, wanted)


def test_several_packs_a_thread(seed: int) -> None:
    operation = OPERATIONS["add"]
    problem = AddProblem(4096 * 3 + 3, dtype="fp32")
    inputs = operation.inputs(problem, torch.device("cpu"), seed)
    y = torch.full_like(inputs["x"], float("nan"))
    bind(operation.ladder.rung("vectorised").recipe(problem, PacksConfig(128, 4)), {**inputs, "y": y})()
    assert torch.equal(y, plain(inputs["x"], inputs["residual"], False))


def test_layouts_may_differ(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 8, 3, 5, generator=generator).contiguous(memory_format=torch.channels_last)
    residual = torch.randn(2, 8, 3, 10, generator=generator)[..., ::2]
    y = add(x, residual, relu=True)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y, plain(x, residual, True))
    assert torch.equal(add(residual, x), plain(residual, x, False))
    assert add(x[:0], residual[:0]).shape == (0, 8, 3, 5)


@pytest.mark.parametrize("relu", [False, True])
def test_gradients_are_those_of_pytorch(relu: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    given = [torch.randn(4, 9, generator=generator) for _ in range(2)]
    mine = [tensor.clone().requires_grad_() for tensor in given]
    its = [tensor.clone().requires_grad_() for tensor in given]
    gradient = torch.randn(4, 9, generator=generator)
    add(mine[0], mine[1], relu=relu).backward(gradient)
    plain(its[0], its[1], relu).backward(gradient)
    for one, other in zip(mine, its, strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize(
    ("x", "residual", "sentence"),
    [
        (torch.ones(3), torch.ones(4), r"residual is torch.float32 \[4\] .*add takes x: ..., residual: ..."),
        (torch.ones(3, 4), torch.ones(4), "residual is torch.float32"),
        (torch.ones(3), torch.ones(3).half(), "residual is torch.float16 .*of one dtype"),
        (torch.ones(3).double(), torch.ones(3).double(), r"add takes .*\(float32, float16 or bfloat16\)"),
        (torch.ones(3), torch.ones(3, device="meta"), "residual is .* on meta"),
    ],
)
def test_what_it_refuses(x: torch.Tensor, residual: torch.Tensor, sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        add(x, residual)


def test_names() -> None:
    assert AddProblem(802_816).name == "add_802816"
    assert AddProblem(802_816, relu=True).name == "add_relu_802816"
    with pytest.raises(UnsupportedError, match="does not name a sum"):
        AddProblem.parse("sum_12")


def test_opcheck() -> None:
    x, residual = torch.randn(4, 5), torch.randn(4, 5)
    torch.library.opcheck(torch.ops.escalade.add.default, (x, residual, True))
    torch.library.opcheck(torch.ops.escalade.add.default, (x.requires_grad_(), residual))
