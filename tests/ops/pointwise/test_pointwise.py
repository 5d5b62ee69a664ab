"""Pointwise programs over tensors of any strides: their problems, results, gradients, and refusals."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from escalade.errors import UnsupportedError
from escalade.ops import pointwise
from escalade.ops.expressions import Expression
from escalade.ops.pointwise import PointwiseProblem, View, results

Shapes = tuple[tuple[int, ...], list[tuple[int, ...]]]


@st.composite
def shapes(draw: st.DrawFn) -> Shapes:
    """A result's sizes, and three operands that broadcast to it."""
    shape = tuple(draw(st.lists(st.integers(1, 4), max_size=5)))
    operands = []
    for _ in range(3):
        own = tuple(size if draw(st.booleans()) else 1 for size in shape)
        operands.append(own[draw(st.integers(0, len(own))) :])
    return shape, [shape, *operands[1:]]


@given(shapes(), st.randoms(use_true_random=False))
def test_fewer_dimensions_mean_the_same(given_shapes: Shapes, random: Random) -> None:
    shape, operands = given_shapes
    names = ("x", "a", "b")
    tensors, views = {}, {}
    for name, own in zip(names, operands, strict=True):
        order = list(range(len(own)))
        random.shuffle(order)
        memory = torch.randn([own[axis] for axis in order], dtype=torch.float64)
        tensors[name] = memory.permute([order.index(axis) for axis in range(len(own))])
        views[name] = View(own, tensors[name].stride())
    problem = PointwiseProblem.of("x * a - b", shape, views)
    assert 1 not in problem.shape or problem.shape == (1,)
    assert PointwiseProblem.parse(problem.name) == problem
    flat = {
        name: tensor.permute(sorted(range(tensor.dim()), key=lambda axis: -tensor.stride()[axis]))
        .contiguous()
        .view(-1)
        for name, tensor in tensors.items()
    }
    (found,) = results(problem, flat, torch.float64)
    expected = tensors["x"] * tensors["a"] - tensors["b"]
    torch.testing.assert_close(found.reshape(shape), expected, rtol=0, atol=0)


def test_dimensions_are_put_together() -> None:
    image, channels = (8, 16, 16, 32), (32,)
    problem = PointwiseProblem.of(
        "x * a", image, {"x": View(image, (8192, 512, 32, 1)), "a": View(channels, (1,))}
    )
    assert problem.name == "2048x32[x*a](a:0,1)"
    by_image = View((8, 1, 1, 32), (32, 32, 32, 1))
    problem = PointwiseProblem.of("x * a", image, {"x": View(image, (8192, 512, 32, 1)), "a": by_image})
    assert problem.name == "8x256x32[x*a](a:32,0,1)"
    assert problem.bytes == 4 * (2 * math.prod(image) + 8 * 32)


@settings(max_examples=6, deadline=None)  # most of them compile a kernel
@given(shapes(), st.sampled_from(["naive", "vectorised"]))
def test_kernels_broadcast_as_pytorch_does(given_shapes: Shapes, rung: str) -> None:
    _, (first, *others) = given_shapes
    x, a, b = (torch.randn(own) for own in (first, *others))
    got = pointwise("x + sigmoid(a) * b", x=x, a=a, b=b, rung=rung)
    assert isinstance(got, torch.Tensor)
    exact = x.double() + a.double().sigmoid() * b.double()
    torch.testing.assert_close(got.double(), exact, rtol=1e-6, atol=1e-6)


def test_tensors_are_read_as_they_lie(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    image = torch.randn(2, 16, 5, 4, generator=generator).to(memory_format=torch.channels_last)
    other = torch.randn(2, 32, 5, 8, generator=generator)[:, ::2, :, ::2]
    mask = torch.rand(2, 1, 5, 4, generator=generator) > 0.5
    gate = torch.randn(2, 16, 1, 1, generator=generator)
    got = pointwise("where(mask, x * gate, other)", x=image, other=other, mask=mask, gate=gate)
    assert isinstance(got, torch.Tensor) and got.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(got, torch.where(mask, image * gate, other))


def test_several_results_are_a_tuple() -> None:
    x = torch.randn(33, dtype=torch.float16)
    total, square = pointwise("t = x + 1; t, t * t", x=x)
    assert torch.equal(total, x + 1)
    torch.testing.assert_close(square.float(), (x.float() + 1).square(), rtol=1e-3, atol=0)


def test_gradients_are_pytorchs() -> None:
    torch.manual_seed(3)
    tensors = {"x": torch.randn(4, 6, 1), "gate": torch.randn(6, 5)}
    mine: dict[str, Any] = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    theirs = {name: tensor.clone().requires_grad_() for name, tensor in tensors.items()}
    y = pointwise("x * sigmoid(gate)", **mine)
    assert isinstance(y, torch.Tensor)
    y.square().sum().backward()
    (theirs["x"] * theirs["gate"].sigmoid()).square().sum().backward()
    for name in tensors:
        torch.testing.assert_close(mine[name].grad, theirs[name].grad)


def test_nothing_is_computed_of_nothing() -> None:
    y = pointwise("x * a", x=torch.empty(0, 3), a=torch.randn(3))
    assert isinstance(y, torch.Tensor) and y.shape == (0, 3)


def test_what_it_refuses() -> None:
    x = torch.randn(4)
    refused: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("x * a", {"x": x}, "pass exactly the tensors that the expression"),
        ("x * 2", {"x": x, "a": x}, "pass exactly the tensors that the expression"),
        ("x * a", {"x": x, "a": x.half()}, "pointwise needs floating-point tensors of one dtype"),
        ("x + a", {"x": x, "a": torch.randn(3)}, "cannot be broadcast"),
        ("x + 1", {"x": x.double()}, "float32, float16 and bfloat16"),
    )
    for expression, tensors, sentence in refused:
        with pytest.raises(UnsupportedError, match=sentence):
            pointwise(expression, **tensors)
    with pytest.raises(UnsupportedError, match="does not name a pointwise program"):
        PointwiseProblem.parse("silu_12")
    with pytest.raises(UnsupportedError, match="each of the 2 dimensions needs one"):
        PointwiseProblem.parse("4x4[x+a](a:1)")
    many = "+".join(f"x{number}" for number in range(17))
    assert len(Expression.parse(many).inputs) == 17
    with pytest.raises(UnsupportedError, match="up to 16"):
        PointwiseProblem.parse(f"4[{many}]")
