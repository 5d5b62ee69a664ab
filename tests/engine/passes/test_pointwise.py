"""Merged pointwise nodes, those left alone, and results of their plan on the twin."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.engine.passes.casts import drop_rounding
from escalade.engine.passes.pointwise import fuse_neighbors, fuse_recognized, read_unexpanded
from escalade.engine.plan.kernel_program import KernelProgram
from tests.engine.graphs import after, ops


def expressions(run: Callable[..., Any], *passes: Callable[..., Any]) -> list[str]:
    graph = after(run, *passes)
    return [node.attributes["expression"] for node in graph if node.op == "pointwise"]


@pytest.mark.parametrize(
    ("run", "joined"),
    [
        (lambda p, x: (lambda y: y * y.sigmoid())(p.first(x)), ["x * sigmoid(x)"]),
        (lambda p, x: torch.where(x > 0, x, 0.1 * x), ["where(x > 0, x, x * 0.1)"]),
        (lambda p, x: (x.exp() + 1).log(), ["log(exp(x) + 1)"]),
        (lambda p, x: x * torch.tensor(2.0) + torch.tensor([[1.0]]), ["x * 2 + 1"]),
        (lambda p, x: (lambda y: (y.exp(), y.cos()))(x * 2), ["x * 2", "exp(x)", "cos(x)"]),  # two readers
        (lambda p, x: (lambda y: (y, y.exp()))(x * 2), ["x * 2", "exp(x)"]),  # an output
        (lambda p, x: x * x.mean((2, 3), keepdim=True).sigmoid(), ["sigmoid(x)", "x * a"]),  # broadcast
        (lambda p, x: (x.sin() * 2).relu() + x.cos(), ["sin(x) * 2", "cos(x)"]),  # not of this operator
    ],
)
def test_attention_written_in_several_calls_is_one_node(run: Callable[..., Any], joined: list[str]) -> None:
    assert expressions(run, fuse_recognized) == joined


@pytest.mark.parametrize(
    ("run", "joined"),
    [
        (lambda p, x: (lambda y: (y.exp(), y.cos()))(x * 2), ["exp(x * 2)", "cos(x * 2)"]),  # computed twice
        (lambda p, x: (lambda y: (y.exp(), y.mean()))(x * 2), ["x * 2", "exp(x)"]),  # the mean needs it
        (lambda p, x: (lambda y: (y, y.exp()))(x * 2), ["x * 2", "exp(x)"]),  # the caller needs it
        (lambda p, x: x * x.mean((2, 3), keepdim=True).sigmoid(), ["x * sigmoid(a)"]),
        (lambda p, x: (x.sin() * 2).relu() + x.cos(), ["relu(sin(x) * 2) + cos(x)"]),
        (lambda p, x: F.gelu(x + x.flip(1)) * 2, ["gelu(x + a) * 2"]),
    ],
)
def test_neighbors_are_joined(run: Callable[..., Any], joined: list[str]) -> None:
    assert expressions(run, fuse_recognized, fuse_neighbors) == joined


@pytest.mark.parametrize(
    ("run", "joined", "left"),
    [
        (lambda p, x: x * x.mean((2, 3), True).sigmoid().expand_as(x), ["sigmoid(x)", "x * a"], 0),
        (lambda p, x: x + x.amax(1, True).repeat(1, x.shape[1], 1, 1), ["x + a"], 0),
        (lambda p, x: x / torch.arange(1.0, 7).view(6, 1).expand(6, 6).expand(3, 6, 6), ["x / a"], 0),
        # No other value has its sizes.
        (lambda p, x: x.mean((2, 3), True).expand(-1, -1, 2, 2) * 2, ["x * 2"], 1),
        (lambda p, x: x * x[:, :, :3].repeat(1, 1, 2, 1), ["x * a"], 1),  # not a dimension of size one
        (lambda p, x: torch.mul(*torch.broadcast_tensors(x, x.mean(1, True))), ["x * a"], 0),
    ],
)
def test_values_recomputed_for_a_node_are_read_unchanged(
    run: Callable[..., Any], joined: list[str], left: int
) -> None:
    graph = after(run, read_unexpanded)
    assert [node.attributes["expression"] for node in graph if node.op == "pointwise"] == joined
    assert sum("expand" in str(node) or "repeat" in str(node) for node in graph if node.op == "aten") == left


def test_recomputed_values_may_have_been_rounded_before() -> None:
    """The plan rounds all of its values, and drops the cast."""

    def run(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x * x.mean((2, 3), True).sign().half().expand_as(x)

    assert "aten" not in ops(after(run, partial(drop_rounding, dtype="fp16"), read_unexpanded))


def test_a_node_takes_no_more_than_eight_values() -> None:
    def run(p: Any, x: torch.Tensor) -> torch.Tensor:
        return sum((x.roll(shift, 3).exp() for shift in range(1, 12)), x)

    graph = after(run, fuse_recognized, fuse_neighbors)
    nodes = [node for node in graph if node.op == "pointwise"]
    assert len(nodes) == 2 and max(len(node.inputs) for node in nodes) == 8


class Attention(nn.Module):
    """Squeeze-and-excite, a scaled residual, positions, booleans, and results in both layouts."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.down, self.up = (
            nn.Conv2d(8, 16, 3, padding=1),
            nn.Conv2d(16, 4, 1),
            nn.Conv2d(4, 16, 1),
        )
        self.scale = nn.Parameter(torch.rand(16, 1, 1))
        self.positions = nn.Parameter(torch.rand(1, 16, 6, 6))
        self.slopes = nn.PReLU(16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = F.hardswish(self.conv(x))
        gate = self.up(F.silu(self.down(y.mean((2, 3), keepdim=True)))).sigmoid()
        z = y * gate + y * self.scale
        z = torch.where(z > 0.1, z, 0.1 * z) + self.positions
        return self.slopes(z), z.mean((2, 3)) * 2 - z.amax((2, 3))


@pytest.mark.share(7)
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_kernels_match_the_model(dtype: str) -> None:
    torch.manual_seed(5)
    model = Attention().eval()
    graph = capture(model, (torch.randn(1, 8, 6, 6),))
    twin = Engine(graph, dtype, "twin")
    x = torch.randn(3, 8, 6, 6)
    program = twin.program(x)
    assert isinstance(program, KernelProgram)
    assert not program.plan.fallbacks
    assert not {"relu", "add"} & set(ops(program.plan.graph))
    program._values.arena.fill_(0xFF)
    with torch.no_grad():
        for got, wanted in zip(twin(x), model(x), strict=True):
            torch.testing.assert_close(got, wanted, rtol=2e-2, atol=5e-3 if dtype == "fp16" else 1e-5)
