"""Functions after nodes that only move or repeat elements are fused into the layer before those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.engine.passes import optimize
from escalade.engine.passes.epilogues import fuse_expressions
from escalade.ops.base.card import H200
from tests.engine.graphs import Parts, after, graph_of, node_of, ops
from tests.engine.nodes.test_gradients import planned

_FUNCTIONS = {"relu", "gelu", "pointwise"}
Run = Callable[[Parts, torch.Tensor], Any]


def _shuffled_by_hand(p: Parts, x: torch.Tensor) -> torch.Tensor:
    y = p.first(x).view(-1, 2, 2, 2, 6, 6).permute(0, 1, 4, 2, 5, 3)
    return F.gelu(y.reshape(-1, 2, 12, 12))


@pytest.mark.parametrize(
    "run",
    [
        lambda p, x: F.leaky_relu(F.pixel_shuffle(p.first(x), 2), 0.2),
        lambda p, x: F.relu(F.pixel_unshuffle(p.first(x), 2)) * 3,
        lambda p, x: torch.tanh(F.interpolate(p.first(x), scale_factor=2)),
        lambda p, x: torch.tanh(F.interpolate(p.first(x), (7, 9), mode="nearest-exact")),
        lambda p, x: F.silu(F.channel_shuffle(p.first(x), 2)),
        lambda p, x: F.silu(torch.flip(p.first(x), (3,)).repeat_interleave(2, 2).roll(1, 3)),
        lambda p, x: torch.sigmoid(p.first(x).amax((2, 3), keepdim=True).expand(-1, -1, 5, 4)),
        lambda p, x: F.relu(torch.cat([p.first(x), p.first(x) * 2, F.pixel_shuffle(p.first(x), 1)], 1)),
        lambda p, x: torch.tanh(F.pad(p.first(x), (1, 2, 0, 1), mode="reflect")),
        lambda p, x: torch.tanh(F.pad(p.first(x), (1, 2, 0, 1))),
        lambda p, x: torch.sigmoid(F.pad(p.first(x), (1, 2, 0, 1), value=-2.0)),
        _shuffled_by_hand,
    ],
)
def test_functions_are_computed_before_elements_are_moved(run: Run) -> None:
    graph = after(run, fuse_expressions)
    assert not _FUNCTIONS & {*ops(graph)}


@pytest.mark.parametrize(
    "run",
    [
        lambda p, x: (lambda y: (F.relu(y), y))(
            F.pixel_shuffle(p.first(x), 2)
        ),  # two readers of the moved value
        lambda p, x: (lambda y: F.relu(F.pixel_shuffle(y, 2)).sum() + y.sum())(p.first(x)),  # of the layer
        lambda p, x: F.relu(torch.cat([p.first(x), x], 1)),  # not of a layer
        lambda p, x: (lambda y: F.relu(torch.cat([y, y], 1)))(p.first(x)),
        lambda p, x: F.relu(F.pixel_shuffle(F.max_pool2d(p.first(x), 2), 2)),
        lambda p, x: F.gelu(F.interpolate(p.first(x), scale_factor=2, mode="bilinear")),
        lambda p, x: F.gelu(F.interpolate(p.first(x), (3, 12))),  # drops rows
        lambda p, x: F.gelu(p.first(x)[:, :4]),
        lambda p, x: F.gelu(F.pad(p.first(x), (1, -1, 0, 0))),
        lambda p, x: torch.reciprocal(F.pad(p.first(x), (1, 1, 1, 1))),  # no such number for the padding
        lambda p, x: torch.reciprocal(F.pad(p.first(x).abs(), (1, 1, 1, 1), value=1e-40)),
    ],
)
def test_functions_that_stay_where_they_are(run: Run) -> None:
    graph = after(run, fuse_expressions)
    assert _FUNCTIONS & {*ops(graph)}


def test_padding_becomes_a_function_of_its_value() -> None:
    graph = after(lambda p, x: torch.sigmoid(F.pad(p.first(x), (1, 1, 1, 1))), fuse_expressions)
    assert node_of(graph, "pad2d").attributes["value"] == 0.5
    # If zeros stay zeros, they become padding of the next layer.
    graph = optimize(graph_of(lambda p, x: p.a(F.relu(F.pad(p.first(x), (1, 1, 1, 1))))), "fp32")
    assert not {"pad2d", "relu"} & {*ops(graph)}


@pytest.mark.parametrize(
    ("channels", "tail", "text"),
    [
        (64, lambda y: F.leaky_relu(F.pixel_shuffle(y, 2), 0.2), "leaky_relu(x, 0.2)"),
        (16, lambda y: torch.tanh(F.interpolate(y, scale_factor=2)), "tanh(x)"),
    ],
)
def test_a_plan_has_two_steps(channels: int, tail: Callable[..., torch.Tensor], text: str) -> None:
    class Chain(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return tail(super().forward(x))

    model = Chain(16, channels, 3, padding=1).eval()
    large, small = torch.empty(32, 16, 128, 128), torch.randn(2, 16, 6, 6)
    first, second = Engine(capture(model, (large[:2],)), "tf32", "twin").plan_for(H200, large).steps
    assert first.node.attributes["activation"] == text and second.node.op in ("pixel_shuffle", "upsample2d")
    found = Engine(capture(model, (small,)), "tf32", "twin")(small)
    torch.testing.assert_close(found, model(small).detach(), rtol=1e-2, atol=2e-3)


def test_a_training_step_reads_results_where_gradients_do() -> None:
    """The gradient of a ReLU reads its result, which the layer can compute; that of SiLU reads its input."""
    x, target = torch.randn(2, 3, 4, 4), torch.randn(2, 4, 8, 8)
    for function, moves in ((torch.relu, True), (F.silu, False)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.PixelShuffle(2))
        loss = lambda y, t, f=function: F.mse_loss(f(y), t)  # noqa: E731
        joint, plan, (found, *gradients) = planned(model, loss, x, target)
        (layer,) = (step.node for step in plan.steps if step.node.op == "conv2d")
        assert layer.attributes["relu"] is moves and "activation" not in layer.attributes
        expected = loss(model(x), target)
        expected.backward()
        torch.testing.assert_close(found, expected.detach())
        for name, gradient in zip(joint.trained, gradients, strict=True):
            torch.testing.assert_close(gradient, model.get_parameter(name).grad, rtol=1e-4, atol=1e-5)


def test_a_function_stays_behind_a_cast() -> None:
    """A 16-bit layer would round its result."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.PixelShuffle(2)).bfloat16()
    x, target = torch.randn(2, 3, 6, 6).bfloat16(), torch.randn(2, 4, 8, 8)
    _, plan, (found, *_) = planned(model, lambda y, t: F.mse_loss(torch.relu(y.float()), t), x, target)
    (layer,) = (step.node for step in plan.steps if step.node.op == "conv2d")
    assert not layer.attributes["relu"] and found.dtype == torch.float32
