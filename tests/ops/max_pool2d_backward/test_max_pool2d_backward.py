"""The gradient of a maximum: PyTorch's rules for ties and NaN, refusals, the operator, and autograd."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from escalade.errors import UnsupportedError
from escalade.ops import OPERATIONS, max_pool2d, max_pool2d_backward, max_pool2d_with_places
from escalade.ops.choose.choice import choose
from escalade.ops.max_pool2d_backward import MaxPool2dBackwardProblem
from tests import formulas

CPU = torch.device("cpu")
PLAIN = MaxPool2dBackwardProblem.parse("8_9_k3s2p1_b2")
# Few kernels: the twin compiles each combination of window, dtype and layout.
WINDOW: dict[str, Any] = {"kernel": 3, "stride": 2, "padding": 1}
LAYOUTS = [torch.contiguous_format, torch.channels_last]


def tensors(
    memory_format: torch.memory_format = torch.contiguous_format,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, full of ties, and a gradient of y whose sums are exact in every dtype."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randint(-2, 3, (2, 8, 9, 9), generator=generator).float()
    gradient = torch.randint(-4, 5, (2, 8, 5, 5), generator=generator).float()
    return x.contiguous(memory_format=memory_format), gradient.contiguous(memory_format=memory_format)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize(
    ("rung", "memory_format"), [("atomics", LAYOUTS[0]), ("gathered", LAYOUTS[0]), ("vectorised", LAYOUTS[1])]
)
def test_the_first_of_equals_and_the_last_nan(
    rung: str, memory_format: torch.memory_format, mask: bool
) -> None:
    x, gradient = tensors(memory_format)
    x[0, 0] = float("-inf")
    x[0, 1, 2::3, 1::2] = float("nan")
    expected, places = formulas.max_pool_gradient(x, gradient, 3, 2, 1, mask=mask)
    found = max_pool2d_backward(gradient, x=x, mask=mask, rung=rung, **WINDOW)
    assert found.is_contiguous(memory_format=memory_format)
    assert torch.equal(found.double(), expected)
    found, kept = max_pool2d_with_places(x, behind_relu=mask, **WINDOW)
    torch.testing.assert_close(found, max_pool2d(x, **WINDOW), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(kept, places)
    by_places = max_pool2d_backward(gradient, places=kept, size=9, **WINDOW)
    assert torch.equal(by_places.double(), expected)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"mask": True, "stored": True}, "places already mark clipped maxima"),
        ({"dtype": "fp64"}, "dtype 'fp64'"),
        ({"forward": replace(PLAIN.forward, layout="nhwc", x_pitch=16)}, "dense images"),
        (
            {"forward": replace(PLAIN.forward, height=40, kernel=(32, 8)), "stored": True},
            "so windows have at most 255 pixels",
        ),
    ],
)
def test_impossible_problems_are_refused_with_a_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UnsupportedError, match=sentence):
        replace(PLAIN, **change)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"x": None}, "or places and the size of x"),
        ({"x": None, "size": 9}, "not both or neither"),
        ({"x": torch.ones(2, 8, 9, 9).half()}, "x is torch.float16 .*of one dtype"),
        (
            {"x": torch.ones(2, 8, 9, 7)},
            r"gradient has shape \(2, 8, 5, 5\); for .* it must be \(2, 8, 5, 4\)",
        ),
        ({"x": None, "size": 9, "places": torch.ones(2, 8, 5, 5)}, r"places: N C P Q of uint8"),
        ({"gradient": torch.ones(8, 5, 5)}, "gradient: N C P Q"),
        ({"gradient": torch.ones(2, 8, 5, 5).double()}, "float32, float16 or bfloat16"),
        ({"rung": "stored"}, "stored needs stored places"),
    ],
)
def test_what_it_refuses(change: dict[str, Any], sentence: str) -> None:
    given = {"gradient": torch.ones(2, 8, 5, 5), "x": torch.ones(2, 8, 9, 9), **WINDOW}
    with pytest.raises(UnsupportedError, match=sentence):
        max_pool2d_backward(**{**given, **change})


def test_atomics_are_for_those_who_name_them() -> None:
    operation = OPERATIONS["max_pool2d_backward"]
    chosen = {choose(operation, problem, CPU).rung.name for problem in operation.small_problems}
    chosen |= {choose(operation, replace(p, layout="nhwc"), CPU).rung.name for p in operation.small_problems}
    assert chosen == {"vectorised", "rows", "stored", "gathered"}


@pytest.mark.parametrize("memory_format", LAYOUTS)
def test_opcheck(memory_format: torch.memory_format) -> None:
    x, gradient = tensors(memory_format)
    _, places = formulas.max_pool_gradient(x, gradient, 3, 2, 1)
    gradient.requires_grad_()
    with_places = torch.ops.escalade.max_pool2d_with_places.default
    torch.library.opcheck(with_places, (x.clone().requires_grad_(), [3, 3], [2, 2], [1, 1], False))
    for kept in ((x, None), (None, places)):
        torch.library.opcheck(
            torch.ops.escalade.max_pool2d_backward.default,
            (gradient, *kept, [9, 9], [3, 3], [2, 2], [1, 1], False),
        )


def test_autograd_once_and_twice_and_compiled() -> None:
    """Through this operator, also for a compiled network."""
    x, _ = tensors(torch.channels_last)

    def gradients(pool: Any) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.clone().requires_grad_()
        (once,) = torch.autograd.grad(pool(leaf).square().sum(), leaf, create_graph=True)
        return once, torch.autograd.grad(once.square().sum(), leaf)[0]

    def ours(t: torch.Tensor) -> torch.Tensor:
        return max_pool2d(t, **WINDOW)

    expected = gradients(lambda t: F.max_pool2d(t, 3, 2, 1))
    for found, wanted in zip(gradients(ours), expected, strict=True):
        assert torch.equal(found, wanted) and found.is_contiguous(memory_format=torch.channels_last)
    torch._dynamo.reset()
    leaf = x.clone().requires_grad_()
    torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=True)(leaf).square().sum().backward()
    assert leaf.grad is not None and torch.equal(leaf.grad, expected[0])


def test_a_relu_in_front_has_its_gradient_in_the_places() -> None:
    x, gradient = tensors(torch.channels_last)
    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(F.max_pool2d(leaf.relu(), 3, 2, 1), leaf, gradient)
    behind = x.relu().requires_grad_()
    y, _ = max_pool2d_with_places(behind, behind_relu=True, **WINDOW)
    assert torch.equal(torch.autograd.grad(y, behind, gradient)[0], expected)


def test_an_empty_batch() -> None:
    y, places = max_pool2d_with_places(torch.ones(0, 8, 9, 9), **WINDOW)
    assert y.shape == places.shape == (0, 8, 5, 5)
    gradient = torch.ones(0, 8, 5, 5)
    assert max_pool2d_backward(gradient, x=torch.ones(0, 8, 9, 9), **WINDOW).shape == (0, 8, 9, 9)
