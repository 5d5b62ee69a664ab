"""Images in either layout: free permutations, and conversions where needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import escalade
from escalade.engine.capture.export import capture
from escalade.engine.graph.graph import Graph
from escalade.engine.passes import for_batch, optimize
from escalade.models import settle
from escalade_bench.zoo.layers import LAYERS
from tests.engine.graphs import ops

CHANNELS = 8


class Layers(nn.Module):
    """Layers run by a function of them and an image."""

    def __init__(self, run: Callable[[Layers, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.norm = nn.LayerNorm(CHANNELS)
        self.wide = nn.Linear(CHANNELS, 2 * CHANNELS)
        self.narrow = nn.Linear(2 * CHANNELS, CHANNELS)
        self.square = nn.Linear(CHANNELS, CHANNELS)
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self, x)


def _inverted_bottleneck(m: Layers, x: torch.Tensor) -> torch.Tensor:
    y = m.conv(x)
    rows = m.narrow(F.gelu(m.wide(m.norm(y.permute(0, 2, 3, 1)))))
    return y + rows.permute(0, 3, 1, 2)


def _rolled(m: Layers, x: torch.Tensor) -> torch.Tensor:
    """Rows of channels with an operator in between that cannot move past a permutation."""
    rows = torch.roll(m.conv(x).permute(0, 2, 3, 1), 1, 1)
    return torch.softmax(m.square(m.norm(rows)), -1).permute(0, 3, 1, 2)


def _tokens(m: Layers, x: torch.Tensor) -> torch.Tensor:
    tokens = m.conv(x).flatten(2).transpose(1, 2)
    return m.square(m.norm(tokens)).mean(1)


def _other_orders(m: Layers, x: torch.Tensor) -> torch.Tensor:
    y = m.conv(x)
    return y.permute(0, 1, 3, 2) + y.permute(0, 2, 3, 1).permute(0, 3, 2, 1).relu() + y.transpose(-1, -2)


def _without_layers(m: Layers, x: torch.Tensor) -> torch.Tensor:
    return F.relu(x) + x


MODELS = {
    "inverted bottleneck": _inverted_bottleneck,
    "rolled": _rolled,
    "tokens": _tokens,
    "other orders": _other_orders,
    "without layers": _without_layers,
}


def _planned(name: str, dtype: str = "fp32") -> Graph:
    graph = capture(Layers(MODELS[name]).eval(), (torch.randn(2, 3, 6, 6),))
    return for_batch(optimize(graph, dtype), dtype, 2)


@pytest.mark.share(7)
@pytest.mark.parametrize("device", ["cpu", "twin"])
@pytest.mark.parametrize("name", MODELS)
def test_results_are_the_models(name: str, device: str) -> None:
    torch.manual_seed(0)
    model, x = Layers(MODELS[name]).eval(), torch.randn(2, 3, 6, 6)
    for given in (x, x.to(memory_format=torch.channels_last)):
        engine = escalade.compile(model, given, device=device)
        torch.testing.assert_close(engine(given), model(given).detach(), rtol=1e-4, atol=1e-5)


def test_a_block_that_leaves_channels_first_and_comes_back_has_no_permutation() -> None:
    graph = _planned("inverted bottleneck")
    assert "permute" not in ops(graph) and "linear" not in ops(graph)
    assert ops(graph).count("conv2d") + ops(graph).count("few_channels") == 3


def test_rows_of_channels_are_the_bytes_of_an_image_in_nhwc() -> None:
    engine = escalade.compile(Layers(_rolled).eval(), torch.randn(2, 3, 6, 6), device="twin")
    steps = engine.plan(torch.randn(2, 3, 6, 6)).steps
    assert [step.is_alias for step in steps if step.node.op == "permute"] == [True]
    assert [step.is_alias for step in steps if step.node.op == "move"] == [
        False
    ]  # the roll of the other's bytes
    layouts = {
        step.node.op: engine.plan(torch.randn(2, 3, 6, 6)).forms[step.node.name].layout for step in steps
    }
    assert layouts["linear"] == layouts["softmax"] == "nchw"


def test_images_that_come_in_nhwc_are_returned_so_and_never_converted() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.AvgPool2d(2), nn.Upsample(scale_factor=2)).eval()
    x = torch.randn(2, 8, 6, 6)
    engine = escalade.compile(model, x, device="cpu")
    last = x.to(memory_format=torch.channels_last)
    for given, format in ((x, torch.contiguous_format), (last, torch.channels_last)):
        y = engine(given)
        assert y.is_contiguous(memory_format=format)
        torch.testing.assert_close(y, model(x).detach(), rtol=1e-4, atol=1e-5)
    steps = {format: engine.plan(given).steps for format, given in (("nchw", x), ("nhwc", last))}
    converted = {f: sum(s.node.op == "convert" and not s.is_alias for s in steps[f]) for f in steps}
    assert converted == {"nchw": 2, "nhwc": 0}


def test_odd_channels_that_are_returned_are_made_with_some_more_and_left_out() -> None:
    """A norm after them is fused into the conversion."""
    model = nn.Sequential(nn.Conv2d(8, 21, 3, bias=False), nn.Sigmoid(), nn.BatchNorm2d(21)).eval()
    x = torch.randn(2, 8, 6, 6)
    settle(model, x)
    graph = capture(model, (x,))
    shapes = [tuple(node.shape[1:]) for node in optimize(graph, "fp16")][-2:]
    assert shapes == [(24, 4, 4), (21, 4, 4)]
    assert "batch_norm" not in ops(optimize(graph, "fp16"))
    engine = escalade.compile(model, x, dtype="fp16", device="twin")
    torch.testing.assert_close(engine(x), model(x).detach(), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("name", ["squeeze_excite", "pad_reflect"])
def test_layout_agnostic_layers_read_inputs_of_the_plans_dtype(name: str) -> None:
    """For any successor: gates read the mean over an image, which is the same in both layouts."""
    model = LAYERS[name]().eval()
    x = torch.randn(2, 64, 4, 6, generator=torch.Generator().manual_seed(0))
    engine = escalade.compile(model, x, dtype="fp16", device="twin")
    assert "convert" not in [step.node.op for step in engine.plan(x).steps]
    torch.testing.assert_close(engine(x), model(x).detach(), rtol=3e-3, atol=3e-3)


def test_layout_agnostic_layers_keep_the_callers_layout() -> None:
    assert "convert" not in ops(_planned("without layers"))


@pytest.mark.parametrize(
    "function",
    [
        lambda y: F.local_response_norm(y, 5),
        lambda y: F.local_response_norm(y, 4),
        lambda y: F.max_pool3d(y.tanh().unsqueeze(1), (3, 1, 1), (2, 1, 1), (1, 0, 0)).squeeze(1),
        lambda y: F.avg_pool3d(y.unsqueeze(1), (2, 1, 1)).flatten(1).tanh(),
    ],
)
def test_windows_over_channels_slide_along_pixels(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3), Layers(lambda m, y: function(y)))
    x = torch.randn(2, CHANNELS, 6, 7)
    found = ops(optimize(capture(model.eval(), (x,)), "fp32"))
    last = max(number for number, op in enumerate(found) if op in ("max_pool2d", "avg_pool2d"))
    assert "convert" not in found[found.index("conv2d") : last]
    engine = escalade.compile(model, x, device="twin")
    for given in (x, x[:1]):
        torch.testing.assert_close(engine(given), model(given).detach())


def test_windows_over_channels_of_an_nchw_image_stay_there() -> None:
    graph = capture(Layers(lambda m, x: F.local_response_norm(x, 3)), (torch.randn(2, 8, 4, 5),))
    assert "permute" not in ops(optimize(graph, "fp32"))
