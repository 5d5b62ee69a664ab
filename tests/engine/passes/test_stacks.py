"""A stack reduced over the new dimension becomes a function of its items."""

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


def split(p: Parts, x: torch.Tensor) -> torch.Tensor:
    """Channels in two groups."""
    y = torch.cat([p.first(x), p.a(p.first(x))], 1)
    return y.view(y.shape[0], 2, 8, *y.shape[2:])


def weighted(p: Parts, x: torch.Tensor) -> torch.Tensor:
    """Branches weighted by a function of all of them."""
    found = branches(p, x)
    weights = found.sum(1).mean((2, 3)).repeat(1, 3).view(-1, 3, 8, 1, 1).softmax(1)
    return (found * weights + found[:, :1]).sum(1)


def weighted_last(p: Parts, x: torch.Tensor) -> torch.Tensor:
    found = branches(p, x, -1)
    return (found * found.mean((2, 3), keepdim=True).softmax(-1)).sum(-1)


@pytest.mark.parametrize(
    "run",
    [
        weighted,
        weighted_last,
        lambda p, x: branches(p, x).mean(1, keepdim=True),
        lambda p, x: branches(p, x, -1).amax(-1),
        lambda p, x: (branches(p, x, 2) * 2).exp().amin(2),
        lambda p, x: branches(p, x).max(1).values,
        lambda p, x: torch.cat([p.first(x).unsqueeze(1), p.a(p.first(x)).unsqueeze(1)], 1).sum(1),
        lambda p, x: split(p, x).sum(1),
        lambda p, x: (split(p, x) * split(p, x).mean((3, 4), keepdim=True).softmax(1)).sum(1),
        lambda p, x: split(p, x).amax(1, keepdim=True),
    ],
)
def test_items_are_not_stacked(run: Run) -> None:
    graph = after(run, resolve_stacks)
    reduced = [node for node in graph if node.op == "reduce" and len(node.attributes["dims"]) == 1]
    assert not reduced
    if run not in (weighted, weighted_last):
        assert "aten" not in ops(graph)


@pytest.mark.parametrize(
    "run",
    [
        lambda p, x: branches(p, x).sum(2),  # over another dimension
        lambda p, x: branches(p, x).var(1),
        lambda p, x: branches(p, x).sum((1, 2)),
        lambda p, x: torch.stack([p.first(x)], 1).sum(1),
        lambda p, x: torch.stack([p.first(x) * number for number in range(9)], 1).sum(1),
        lambda p, x: torch.cat([p.first(x), p.a(p.first(x))], 1).sum(1),
        lambda p, x: p.first(x).unflatten(1, (2, 4)).sum(1),  # misaligned slices
        lambda p, x: p.first(x).unflatten(1, (4, 2)).sum(2),  # nonadjacent channels
    ],
)
def test_unresolved_stacks_stay(run: Run) -> None:
    found = ops(after(run, resolve_stacks))
    assert "aten" in found or "reduce" in found
