"""Engines that run on another device than their model was captured on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from escalade.engine import Engine
from escalade.engine.capture.export import capture
from escalade.engine.graph.aten import OperatorError
from escalade.engine.graph.graph import Graph, map_leaves
from escalade.engine.nodes.evaluate import compute
from escalade.engine.plan import stepwise


class Positions(nn.Module):
    """Tensors created in `forward`, one whose size follows the batch, read by kernels and through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 8, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, _, height, width = x.shape
        rows = (~torch.zeros(batch, height, width, dtype=torch.bool, device=x.device)).cumsum(1)
        rows = rows / (rows[:, -1:] + 1e-6)
        columns = torch.arange(width, device=x.device) / width
        return self.conv(x) * rows[:, None] + columns


def _captured_on_meta(model: nn.Module, x: torch.Tensor) -> Graph:
    """A graph whose factory calls name a device other than the one that engines here use."""
    graph = capture(model, (x,))

    def elsewhere(leaf: object) -> object:
        return torch.device("meta") if isinstance(leaf, torch.device) else leaf

    nodes = {
        name: replace(node, attributes=map_leaves(elsewhere, node.attributes))
        for name, node in graph.nodes.items()
    }
    assert nodes != graph.nodes
    return replace(graph, nodes=nodes)


@pytest.mark.parametrize("way", ["cpu", "twin", "stepwise"])
def test_factories_create_tensors_where_the_engine_runs(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "stepwise":
        monkeypatch.setattr(stepwise, "_HOST_US_PER_STEP", 0.0)
    model, x = Positions().eval(), torch.randn(2, 2, 5, 6)
    engine = Engine(_captured_on_meta(model, x), "fp32", "cpu" if way == "cpu" else "twin", 2)
    for given in (x, torch.randn(3, 2, 5, 6)):
        torch.testing.assert_close(engine(given), model(given), rtol=1e-4, atol=1e-5)


def test_a_result_on_another_device_is_refused() -> None:
    graph = capture(nn.Softshrink(), (torch.randn(2, 3),))
    (node,) = graph.at(2)
    with pytest.raises(OperatorError, match="computed on meta; the plan is on cpu"):
        compute(node, dict.fromkeys(node.inputs, torch.empty(2, 3, device="meta")), torch.device("cpu"))
