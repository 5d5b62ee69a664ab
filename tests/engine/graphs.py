"""Small graphs for the tests of passes, and their evaluation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from escalade.engine.capture.export import capture
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.evaluate import compute


class Parts(nn.Module):
    """Layers for small networks."""

    def __init__(self, run: Callable[[Parts, torch.Tensor], Any]) -> None:
        super().__init__()
        self.run = run
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.a = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.b = nn.Conv2d(8, 8, 1)
        self.wide = nn.Conv2d(8, 16, 3, 2, 1, bias=False)
        self.short = nn.Conv2d(8, 16, 1, 2, bias=False)
        self.n, self.m = nn.BatchNorm2d(8), nn.BatchNorm2d(8, affine=False)
        self.wn, self.sn = nn.BatchNorm2d(16), nn.BatchNorm2d(16)
        self.fc, self.fn = nn.Linear(8 * 6 * 6, 5), nn.BatchNorm1d(5)
        self.rows, self.rn = nn.Linear(36, 4), nn.BatchNorm1d(8)
        self.head, self.pair = nn.Linear(8, 5), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def graph_of(run: Callable[[Parts, torch.Tensor], Any], side: int = 6) -> Graph:
    torch.manual_seed(1)
    model = Parts(run)
    for norm in model.modules():
        if isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d)):
            assert norm.running_mean is not None and norm.running_var is not None
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.3, 3)
            if norm.affine:
                nn.init.uniform_(norm.weight, -1, 2)
                nn.init.normal_(norm.bias)
    graph = capture(model, (torch.randn(1, 3, side, side),))
    graph.remove_dead_code()
    return graph


def evaluate(graph: Graph, x: torch.Tensor) -> list[torch.Tensor]:
    fixed = graph.at(x.shape[0])
    values = {fixed.inputs[0].name: x, **fixed.constants}
    with torch.no_grad():
        for node in fixed:
            read = {role: values[name] for role, name in node.inputs.items()}
            values[node.name] = compute(node, read, torch.device("cpu"))
            assert tuple(values[node.name].shape) == node.shape, node
    return [values[name] for name in fixed.outputs]


def same_results(before: Graph, after: Graph, side: int = 6) -> None:
    x = torch.randn(3, 3, side, side)
    for old, new in zip(evaluate(before, x), evaluate(after, x), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5)


def after(
    run: Callable[[Parts, torch.Tensor], Any], *passes: Callable[[Graph], object], side: int = 6
) -> Graph:
    graph = graph_of(run, side)
    changed = graph.copy()
    for each in passes:
        each(changed)
    changed.remove_dead_code()
    same_results(graph, changed, side)
    return changed


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph]


def node_of(graph: Graph, op: str) -> Node:
    (found,) = (node for node in graph if node.op == op)
    return found
