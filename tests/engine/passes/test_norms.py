"""Norms written out by a model: which become one LayerNorm, which do not, and unchanged results."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from escalade.engine.nodes.norms import LayerNorm
from escalade.engine.passes import optimize
from tests.engine.graphs import Parts, evaluate, graph_of, ops

W, B = 1 + torch.rand(3, 1, 1), torch.randn(3, 1, 1)
Run = Callable[[Parts, Tensor], Tensor]


def convnext(p: Parts, x: Tensor) -> Tensor:
    u = x.mean(1, keepdim=True)
    v = (x - u).pow(2).mean(1, keepdim=True)
    return W * ((x - u) / torch.sqrt(v + 1e-6)) + B


def by_var(p: Parts, x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + 1e-5)


def after_sigmoid(p: Parts, x: Tensor) -> Tensor:
    y = torch.sigmoid(x)
    return torch.relu(y * torch.rsqrt(y.square().mean(1, keepdim=True)) * W)


RECOGNIZED: dict[str, tuple[Run, dict[str, object], set[str]]] = {
    "convnext": (convnext, {"epsilon": 1e-6, "rms": False, "of_channels": True}, {"x", "weight", "bias"}),
    "by_var": (by_var, {"epsilon": 1e-5, "rms": False}, {"x"}),
    "rms": (
        lambda p, x: x / torch.sqrt((x * x).mean(1, keepdim=True) + 1e-5),
        {"epsilon": 1e-5, "rms": True, "of_channels": True},
        {"x"},
    ),
    "rms of rows": (
        lambda p, x: x * (x.pow(2).mean(-1, keepdim=True) + 1e-3).pow(-0.5),
        {"epsilon": 1e-3, "rms": True},
        {"x"},
    ),
    "after_sigmoid": (after_sigmoid, {"epsilon": 0.0, "rms": True, "of_channels": True}, {"x", "weight"}),
}


def test_norms_of_rows_and_of_channels_are_recognized() -> None:
    for name, (run, attributes, inputs) in RECOGNIZED.items():
        graph = graph_of(run)
        done = optimize(graph, "fp32")
        (norm,) = (node for node in done if LayerNorm.matches(node))
        assert {key: norm.attributes.get(key) for key in attributes} == attributes, name
        assert set(norm.inputs) == inputs, name
        assert "reduce" not in ops(done), name
        x = torch.randn(2, 3, 6, 6)
        for old, new in zip(evaluate(graph, x), evaluate(done, x), strict=True):
            torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5)


def test_near_norms_stay() -> None:
    def other_mean(p: Parts, x: Tensor) -> Tensor:
        v = (x - x.mean(1, keepdim=True)).pow(2).mean(1, keepdim=True)
        return (x - x.mean(2, keepdim=True)) / torch.sqrt(v + 1e-6)

    def variance_returned(p: Parts, x: Tensor) -> tuple[Tensor, Tensor]:
        v = x.square().mean(1, keepdim=True)
        return x * torch.rsqrt(v + 1e-6), v

    cases: dict[str, Callable[..., object]] = {
        "unbiased": lambda p, x: (x - x.mean(1, keepdim=True)) / torch.sqrt(x.var(1, keepdim=True) + 1e-6),
        "other value": lambda p, x: (x + 1) / torch.sqrt((x * x).mean(1, keepdim=True) + 1e-5),
        "over rows of the image": lambda p, x: x / torch.sqrt((x * x).mean(2, keepdim=True) + 1e-5),
        "not squared": lambda p, x: x / torch.sqrt(x.abs().mean(1, keepdim=True) + 1e-5),
        "a root of another kind": lambda p, x: x / ((x * x).mean(1, keepdim=True) + 1e-5),
        "cubes": lambda p, x: x / torch.sqrt((x**4).mean(1, keepdim=True) + 1e-5),
        "other mean": other_mean,
        "variance returned": variance_returned,
    }
    for name, run in cases.items():
        graph = graph_of(run)
        done = optimize(graph, "fp32")
        assert not any(LayerNorm.matches(node) for node in done), name
        x = torch.randn(2, 3, 6, 6)
        for old, new in zip(evaluate(graph, x), evaluate(done, x), strict=True):
            torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-5, msg=name)
