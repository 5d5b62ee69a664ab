"""Transposed convolutions in plans: with groups, dilation and norms, by every name that models use."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.engine.passes import optimize

LAYERS = {
    "unet": lambda: nn.ConvTranspose2d(16, 8, 2, 2),
    "generator": lambda: nn.ConvTranspose2d(16, 8, 4, 2, 1, bias=False),
    "odd": lambda: nn.ConvTranspose2d(16, 8, 3, (2, 1), 1, (1, 0)),
    "groups": lambda: nn.ConvTranspose2d(16, 8, 3, 2, groups=4, dilation=2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_norm_and_an_activation_go_into_the_layer_in_front(name: str) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8)
    norm.running_mean, norm.running_var = torch.randn(8), torch.rand(8) + 0.5
    model = nn.Sequential(LAYERS[name](), norm, nn.SiLU()).eval()
    x = torch.randn(2, 16, 5, 6)
    graph = capture(model, (x,))
    ops = [node.op for node in optimize(graph, "fp32")]
    assert "conv_transpose2d" in ops and not {"batch_norm", "pointwise", "aten"} & set(ops)
    result = Engine(graph, "fp32", "twin" if name == "unet" else "cpu")(x)
    torch.testing.assert_close(result, model(x).detach(), rtol=1e-4, atol=1e-4)


def test_as_a_convolution_it_is_known_too() -> None:
    weight = torch.randn(4, 3, 2, 2)

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.convolution(x, weight, None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1)

    graph = capture(Model(), (torch.randn(2, 4, 3, 3),))
    assert [node.op for node in graph] == ["conv_transpose2d"]


def test_of_a_single_pixel_it_is_a_product(seed: int) -> None:
    """For any stride equal to the filter: each output pixel then has exactly one tap."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.ConvTranspose2d(6, 4, 4), nn.ReLU(), nn.ConvTranspose2d(4, 3, 4, 2, 1)).eval()
    x = torch.randn(2, 6, 1, 1)
    graph = capture(model, (x,))
    nodes = [node for node in optimize(graph, "fp32") if node.op == "conv_transpose2d"]
    assert [node.attributes["stride"] for node in nodes] == [(4, 4), (2, 2)]
    torch.testing.assert_close(Engine(graph, "fp32", "twin")(x), model(x).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("padding", [(1, 2), (4, 0)])
def test_with_stride_1_it_is_a_convolution_unless_that_cuts_the_image(padding: tuple[int, int]) -> None:
    model = nn.ConvTranspose2d(6, 4, (2, 3), padding=padding, dilation=(3, 2), groups=2).eval()
    x = torch.randn(2, 6, 9, 5)
    graph = capture(model, (x,))
    assert [node.op for node in graph] == ["conv2d" if padding == (1, 2) else "conv_transpose2d"]
    torch.testing.assert_close(Engine(graph, "fp32", "cpu")(x), model(x).detach(), rtol=1e-4, atol=1e-5)
