"""Parts of values that a model overwrites."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.engine.passes.stacks import resolve_scatters


class Model(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x.sin())


def over_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x[:, :4]
    y += 1
    return y * 2


def inside_and_beside(x: torch.Tensor) -> torch.Tensor:
    x[:, 2:6] = x[:, 4:].cos()
    return x[:, 3:5] * x[:, 6:]


def across_its_ends(x: torch.Tensor) -> torch.Tensor:
    x[:, 2:6] = x[:, 4:].cos()
    return x[:, 1:3] * x[:, 5:7]


def over_everything(x: torch.Tensor) -> torch.Tensor:
    x[:, :, :] = x.cos()
    return x.exp()


def in_the_middle(x: torch.Tensor) -> torch.Tensor:
    x[:, :, 1:3] *= 2
    return x.exp()


def at_an_end(x: torch.Tensor) -> torch.Tensor:
    x[..., -2:] = x[..., :2] + 1
    return x


@pytest.mark.parametrize(
    ("function", "joined"),
    [
        (over_a_view, 0),
        (inside_and_beside, 0),
        (across_its_ends, 1),
        (over_everything, 0),
        (in_the_middle, 1),
        (at_an_end, 1),
    ],
)
def test_written_values_are_read_from_their_source(
    function: Callable[[torch.Tensor], torch.Tensor], joined: int
) -> None:
    model, x = Model(function), torch.randn(2, 8, 4, 6)
    expected = model(x)
    graph = capture(model, (x,))
    torch.testing.assert_close(Engine(graph, "fp32", "cpu")(x), expected)
    resolve_scatters(graph)
    graph.remove_dead_code()
    found = [node.op for node in graph]
    assert "aten" not in found and found.count("concatenate") == joined
