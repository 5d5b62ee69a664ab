"""What is stacked and reduced over the new dimension is a function of the items."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from escalade.engine.passes.stacks import resolve_stacks
from tests.engine.graphs import Parts, after, ops

Run = Callable[[Parts, torch.Tensor], Any]


def branches(p: Parts, x: torch.Tensor, at: int = 1) -> torch.Tensor:
    y = p.first(x)
    return torch.stack([y, y.tanh(), p.a(y)], at)


def weighted(p: Parts, x: torch.Tensor) -> torch.Tensor:
    """Branches by weights that all of them decide on."""
    found = branches(p, x)
    weights = found.sum(1).mean((2, 3)).repeat(1, 3).view(-1, 3, 8, 1, 1).softmax(1)
    return (found * weights + found[:, :1]).sum(1)


@pytest.mark.parametrize(
    "run",
    [
        weighted,
        lambda p, x: branches(p, x).mean(1, keepdim=True),
        lambda p, x: branches(p, x, -1).amax(-1),
        lambda p, x: (branches(p, x, 2) * 2).exp().amin(2),
        lambda p, x: branches(p, x).max(1).values,
    ],
)
def test_items_are_not_stacked(run: Run) -> None:
    graph = after(run, resolve_stacks)
    reduced = [node for node in graph if node.op == "reduce" and len(node.attributes["dims"]) == 1]
    assert not reduced
    if run is not weighted:
        assert "aten" not in ops(graph)


@pytest.mark.parametrize(
    "run",
    [
        lambda p, x: branches(p, x).sum(2),  # over another dimension
        lambda p, x: branches(p, x).var(1),
        lambda p, x: branches(p, x).sum((1, 2)),
        lambda p, x: torch.stack([p.first(x)], 1).sum(1),
        lambda p, x: torch.stack([p.first(x) * number for number in range(9)], 1).sum(1),
    ],
)
def test_what_stays_stacked(run: Run) -> None:
    assert "aten" in ops(after(run, resolve_stacks))
