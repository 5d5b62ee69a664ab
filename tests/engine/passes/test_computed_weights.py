"""Weights computed from a model's parameters: when they are constants, and layers of Escalade's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade.engine.capture.export import capture
from escalade.engine.graph.graph import Graph
from escalade.engine.passes import optimize
from escalade.engine.passes.simplify import fold_constants
from tests.engine.graphs import evaluate, node_of, ops


class Computed(nn.Module):
    """Layers whose weights the model computes from its parameters."""

    def __init__(self, run: Callable[[Computed, torch.Tensor], Any]) -> None:
        super().__init__()
        self.run = run
        self.w = nn.Parameter(torch.randn(7, 12))
        self.b = nn.Parameter(torch.randn(7))
        self.small = nn.Parameter(torch.randn(64, 1))

    def forward(self, x: torch.Tensor) -> Any:
        return self.run(self, x)


def computed(
    run: Callable[[Computed, torch.Tensor], Any], *shape: int
) -> tuple[Computed, Graph, torch.Tensor]:
    torch.manual_seed(15)
    model, x = Computed(run), torch.randn(2, *(shape or (12,)))
    return model, capture(model, (x,)), x


@pytest.mark.parametrize(
    ("run", "shape"),
    [
        (lambda m, x: x @ F.normalize(m.w, dim=1).T, (12,)),
        (lambda m, x: torch.matmul(x, m.w.T), (5, 12)),
        (lambda m, x: torch.mm(x, m.w.t()), (12,)),
        (lambda m, x: torch.addmm(m.b, x, m.w.t()), (12,)),
        (lambda m, x: F.linear(x, m.w / m.w.norm(dim=1, keepdim=True), m.b.exp()), (12,)),
        (lambda m, x: x[:, :7] @ m.w, (12,)),
        (lambda m, x: m.w @ x, (12, 4)),  # the constant comes first
    ],
)
def test_products_with_constants_are_linear_layers(run: Callable[..., Any], shape: tuple[int, ...]) -> None:
    model, graph, x = computed(run, *shape)
    done = optimize(graph, "fp32")
    linear = node_of(done, "linear")
    assert {node.attributes["target"] for node in done if node.op == "aten"} <= {"aten::slice.Tensor"}
    assert done.constants[linear.inputs["weight"]].is_contiguous()
    torch.testing.assert_close(evaluate(done, x)[0], model(x))


@pytest.mark.parametrize(
    ("run", "shape"),
    [
        (lambda m, x: x @ x.T, (12,)),
        (lambda m, x: torch.addmm(m.b, x, m.w.t(), alpha=2), (12,)),
        (lambda m, x: torch.addmm(x[:, :7], x, m.w.t()), (12,)),  # the addend comes with the input
        (lambda m, x: x @ m.b[:, None].expand(7, 7).expand(2, 7, 7), (7, 7)),  # a matrix per item
    ],
)
def test_other_products_are_pytorchs(run: Callable[..., Any], shape: tuple[int, ...]) -> None:
    model, graph, x = computed(run, *shape)
    done = optimize(graph, "fp32")
    assert "linear" not in ops(done)
    torch.testing.assert_close(evaluate(done, x)[0], model(x))


def test_convolutions_with_computed_weights_are_escalades() -> None:
    def run(m: Computed, x: torch.Tensor) -> torch.Tensor:
        return F.conv2d(x, m.w.view(7, 3, 2, 2) * m.b.view(7, 1, 1, 1), m.b + 1)

    model, graph, x = computed(run, 3, 5, 5)
    done = optimize(graph, "fp32")
    assert "aten" not in ops(done)
    torch.testing.assert_close(evaluate(done, x)[0], model(x))


def test_constants_are_summed_in_float64() -> None:
    model, graph, _ = computed(lambda m, x: x[:, :1] + m.w.sum())
    fold_constants(graph)
    (total,) = (tensor for tensor in graph.constants.values() if tensor.dim() == 0)
    assert total.dtype == torch.float32
    assert float(total) == float(model.w.detach().double().sum().float())


def test_constants_that_would_grow_are_computed_each_time() -> None:
    model, graph, x = computed(lambda m, x: (x[:, :1, None] + m.small.expand(64, 2**17)).amax((1, 2)))
    fold_constants(graph)
    assert any(node.attributes.get("target") == "aten::expand" for node in graph)
    torch.testing.assert_close(evaluate(graph, x)[0], model(x))
    model, graph, x = computed(lambda m, x: (x[:, :1, None] + m.small.expand(64, 16)).amax((1, 2)))
    fold_constants(graph)
    assert not any(node.attributes.get("target") == "aten::expand" for node in graph)


def test_constants_keep_their_bits_where_they_are_reinterpreted() -> None:
    model, graph, x = computed(lambda m, x: x[:, :7] + m.b.view(torch.int32).bitwise_and(1).float())
    fold_constants(graph)
    assert ops(graph)[-1] in ("add", "pointwise")
    torch.testing.assert_close(evaluate(graph, x)[0], model(x), rtol=0, atol=0)
