"""Softmax and its logarithm as nodes: over the last dimension, and over the channels of an image."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.engine.passes import optimize
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
    """Confident rows too: their logits are large, and their largest logarithm is nearly 0."""
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
        assert bool((ours <= 2 * theirs + torch.finfo(x.dtype).eps * exact.abs()).all())


def test_rows_of_several_items_grow_with_the_batch() -> None:
    x = torch.randn(2, 3, 5, 4)
    engine = Engine(capture(Call(lambda x: torch.softmax(x.flatten(0, 1), 1)), (x,)), "fp32", "cpu")
    for given in (x, x[:1]):
        torch.testing.assert_close(engine(given), torch.softmax(given.flatten(0, 1), 1))


def test_the_batch_is_left_to_pytorch() -> None:
    graph = capture(Call(lambda x: torch.softmax(x, 0)), (torch.randn(2, 6, 4, 4),))
    assert [node.op for node in graph] == ["aten"]
