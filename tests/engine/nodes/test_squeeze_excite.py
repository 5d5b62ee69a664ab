"""Squeeze-and-excite in a graph: which spellings are matched, and which are left alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.engine.passes import for_batch, optimize

CHANNELS, SQUEEZED = 32, 8


class Gated(nn.Module):
    """An image times its gates, by convolutions or by linear layers."""

    def __init__(
        self, linear: bool = False, out: int = CHANNELS, shown: bool = False, groups: int = 1
    ) -> None:
        super().__init__()
        self.linear, self.shown = linear, shown
        if linear:
            self.down: nn.Module = nn.Linear(CHANNELS, SQUEEZED, bias=False)
            self.up: nn.Module = nn.Linear(SQUEEZED, out)
        else:
            self.down = nn.Conv2d(CHANNELS, SQUEEZED, 1, groups=groups)
            self.up = nn.Conv2d(SQUEEZED, out, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        x = torch.cos(x)
        means = x.mean((2, 3), keepdim=not self.linear)
        gate = torch.sigmoid(self.up(nn.functional.silu(self.down(means))))
        y = x[:, : gate.shape[1]] * gate.view(x.shape[0], -1, 1, 1)
        return (y, means) if self.shown else y


def _operators(model: nn.Module, batch: int, dtype: str = "fp16") -> list[str]:
    graph = capture(model.eval(), (torch.randn(batch, CHANNELS, 6, 5),))
    return [node.op for node in for_batch(optimize(graph, dtype, images="nhwc"), dtype, batch)]


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("dtype", ["fp16", "tf32"])
def test_gates_are_one_step(linear: bool, dtype: str) -> None:
    model, x = Gated(linear), torch.randn(3, CHANNELS, 6, 5)
    found = _operators(model, 3, dtype)
    assert found.count("squeeze_excite") == 1
    assert not {"adaptive_avg_pool2d", "conv2d", "linear"} & set(found)
    y = Engine(capture(model.eval(), (x,)), dtype, "cpu")(x)
    torch.testing.assert_close(y, model(x).detach(), rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(
    "model", [Gated(out=16), Gated(shown=True), Gated(groups=2)], ids=["narrower", "shown", "grouped"]
)
def test_gates_of_other_channels_are_left_alone(model: nn.Module) -> None:
    assert "squeeze_excite" not in _operators(model, 3)
