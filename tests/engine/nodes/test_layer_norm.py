"""Norms of rows as nodes: which are matched, and their results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.engine.passes import optimize
from tests.engine.nodes.test_operators import Call


@pytest.mark.parametrize(
    "model",
    [
        nn.LayerNorm((3, 8)),
        nn.LayerNorm(8, bias=False),
        nn.LayerNorm((3, 8), elementwise_affine=False),
        nn.RMSNorm(8),
        nn.RMSNorm((3, 8), eps=1e-3),
        nn.Sequential(nn.LayerNorm(8), nn.SiLU()),
        nn.Sequential(nn.RMSNorm(8), nn.ReLU()),
    ],
    ids=str,
)
def test_a_norm_is_one_node_with_all_that_follows(model: nn.Module) -> None:
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 3, 8)
    graph = capture(model, (x,))
    assert [node.op for node in optimize(graph, "fp32") if node.op != "reshape"] == ["layer_norm"]
    torch.testing.assert_close(Engine(graph, "fp32", "twin")(x), model(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.layer_norm(x, (8,), x[0, 0]),  # different weights at every call
        lambda x: F.rms_norm(x, (8,), x[0, 0]),
        lambda x: F.layer_norm(x, (3, 8), x[0], x[0]),
    ],
)
def test_norms_that_are_left_to_pytorch(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    graph = capture(Call(function), (torch.randn(2, 3, 8),))
    assert "layer_norm" not in {node.op for node in graph}
