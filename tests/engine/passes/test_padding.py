"""Zeros around an image become padding of its reader, if equivalent."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.engine.passes import optimize

CONV = nn.Conv2d(8, 8, 3, 2, (0, 1))
POOL = nn.AvgPool2d(3, 2, count_include_pad=False)


class Model(nn.Module):
    def __init__(self, pads: tuple[int, ...], value: float, *layers: nn.Module) -> None:
        super().__init__()
        self.pads, self.value, self.layers = pads, value, nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        padded = F.pad(x, self.pads, value=self.value)
        return [layer(padded) for layer in self.layers]


@pytest.mark.parametrize(
    ("model", "stays"),
    [
        (Model((1, 1, 1, 1), 0.0, CONV), False),
        (Model((1, 1, 1, 1), 0.0, POOL, CONV), False),
        (Model((1, 1), 0.0, POOL), False),
        (Model((2, 2, 0, 0), 0.0, POOL), True),  # more than half a window
        (Model((0, 1, 0, 1), 0.0, CONV), True),
        (Model((0, 1, 1, 1), 0.0, CONV), True),
        (Model((1, 1, 1, 1), 1.0, CONV), True),
        (
            Model((1, 1, 1, 1), 0.0, nn.AvgPool2d(5, 2, 1, count_include_pad=False)),
            True,
        ),  # of zeros, not of padding
        (Model((1, 1, 1, 1), 0.0, CONV, nn.MaxPool2d(3)), True),
        (Model((1, 1, 1, 1), 0.0, CONV, nn.Identity()), True),  # itself a result
        (Model((1, 1, 2, 2), 0.0, CONV), False),  # other rows than columns
    ],
)
def test_zeros_are_padding_where_that_is_the_same(model: Model, stays: bool) -> None:
    x = torch.randn(2, 8, 7, 9, generator=torch.Generator().manual_seed(0))
    graph = capture(model.eval(), (x,))
    assert ("pad2d" in {node.op for node in optimize(graph, "fp32")}) == stays
    for result, expected in zip(Engine(graph, "fp32", "cpu")(x), model(x), strict=True):
        torch.testing.assert_close(result, expected.detach(), rtol=1e-4, atol=1e-5)
