"""Softmax and its logarithm as nodes: over the last dimension, and over the channels of an image."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.engine.passes import optimize
from escalade.ops.base.card import H200
from tests.engine.nodes.test_gradients import judged
from tests.engine.nodes.test_operators import Call


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.softmax(x, 1),
        lambda x: torch.softmax(F.max_pool2d(x, 2), -3),
        lambda x: torch.softmax(F.max_pool2d(x, 2).permute(0, 2, 3, 1), -1).permute(0, 3, 1, 2),
    ],
)
def test_channels_of_an_image_are_rows_of_its_pixels(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    x = torch.randn(2, 6, 4, 4)
    graph = capture(Call(function), (x,))
    done = optimize(graph, "fp32")
    assert [node.op for node in done if node.op not in ("convert", "max_pool2d")] == ["softmax"]
    assert "convert" not in [node.op for node in done]
    torch.testing.assert_close(Engine(graph, "fp32", "twin")(x), function(x))


@pytest.mark.parametrize(("shape", "at"), [((2, 6, 4, 4), 2), ((2, 3, 5), 1), ((2, 3, 4, 1, 2), -4)])
def test_dimensions_with_others_behind_are_channels_of_images(shape: tuple[int, ...], at: int) -> None:
    x = torch.randn(shape)
    for name, function in (("softmax", torch.softmax), ("log_softmax", torch.log_softmax)):
        graph = capture(Call(partial(function, dim=at)), (x,))
        assert [node.op for node in graph] == ["reshape", name, "reshape"]
        engine = Engine(graph, "fp32", "twin")
        for given in (x, x[:1], torch.cat([x, x])):
            torch.testing.assert_close(engine(given), function(given, at))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_logarithm_is_as_accurate_as_pytorchs(dtype: str) -> None:
    """Confident rows too: their logits are large, and their largest log-probability is nearly 0."""
    logits = torch.randn(2, 6, 4, 4) * torch.tensor([0.1, 30.0]).view(2, 1, 1, 1)
    x = logits.half() if dtype == "fp16" else logits
    for function in (
        lambda x: F.log_softmax(x, 1),
        lambda x: F.log_softmax(x, -1),
        lambda x: F.log_softmax(x.permute(0, 2, 3, 1), -1).permute(0, 3, 1, 2),
    ):
        engine = Engine(capture(Call(function), (x.float(),)), dtype, "twin")
        assert [step.operation for step in engine.explain(x.float()).steps] == ["log_softmax"]
        exact = function(x.double())
        ours, theirs = ((y.double() - exact).abs() for y in (engine(x.float()), function(x)))
        # For a confident class the sum of exponentials is 1 plus rounding, which PyTorch may happen not to have.
        rounding = 2 * torch.finfo(torch.float32).eps if dtype == "fp16" else 0.0
        assert bool((ours <= 2 * theirs + torch.finfo(x.dtype).eps * exact.abs() + rounding).all())


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_functions_of_its_result_are_in_its_kernel(dtype: str) -> None:
    x = torch.randn(2, 6, 4, 4)
    for function in (
        lambda x: torch.softmax(x, 1) * 2,
        lambda x: torch.tanh(F.log_softmax(x, -1) / 3),
        lambda x: F.relu(torch.softmax(x.permute(0, 2, 3, 1), -1) - 0.1).permute(0, 3, 1, 2),
    ):
        engine = Engine(capture(Call(function), (x,)), dtype, "twin")
        assert len([step for step in engine.explain(x).steps if step.operation != "permute"]) == 1
        torch.testing.assert_close(engine(x), function(x), rtol=1e-5 if dtype == "fp32" else 3e-3, atol=2e-4)


def test_a_scale_is_in_its_kernel_behind_a_convolution() -> None:
    """Not fused into the conversion of the result to NCHW either."""
    model = nn.Sequential(nn.Conv2d(16, 64, 1), Call(lambda x: torch.softmax(x, 1) * 2)).eval()
    large, small = torch.empty(32, 16, 128, 128), torch.randn(2, 16, 8, 8)
    plan = Engine(capture(model, (large[:2],)), "tf32", "twin").plan_for(H200, large)
    assert [step.node.op for step in plan.steps] == ["conv2d", "softmax"]
    assert plan.steps[-1].node.attributes["activation"] == "x * 2"
    found = Engine(capture(model, (small,)), "tf32", "twin")(small)
    torch.testing.assert_close(found, model(small).detach(), rtol=1e-2, atol=1e-4)


def test_a_training_step_keeps_values_that_gradients_read() -> None:
    """A scale is fused into a softmax without a gradient, not into one whose gradient reads its result."""

    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        wanted = (torch.softmax(target, 1) * 3).amax(1, keepdim=True)
        return ((torch.softmax(y, 1) * 2 - wanted) ** 2).sum()

    torch.manual_seed(0)
    plan = judged(nn.Conv2d(3, 4, 3), loss, torch.randn(2, 4, 14, 14))
    softmaxes = [step.node for step in plan.steps if step.node.op == "softmax"]
    assert sorted(node.attributes.get("activation", "") for node in softmaxes) == ["", "x * 3"]


def test_rows_of_several_items_grow_with_the_batch() -> None:
    x = torch.randn(2, 3, 5, 4)
    engine = Engine(capture(Call(lambda x: torch.softmax(x.flatten(0, 1), 1)), (x,)), "fp32", "cpu")
    for given in (x, x[:1]):
        torch.testing.assert_close(engine(given), torch.softmax(given.flatten(0, 1), 1))


def test_the_batch_is_left_to_pytorch() -> None:
    graph = capture(Call(lambda x: torch.softmax(x, 0)), (torch.randn(2, 6, 4, 4),))
    assert [node.op for node in graph] == ["aten"]
