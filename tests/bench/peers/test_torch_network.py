"""PyTorch's own ways to run a network: norms folded where torch.fx can, and results in any structure."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from escalade_bench.peers import torch_network
from escalade_bench.peers.network import Task, tensors
from tests.bench.coverage.networks import Segmented


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) if float(x.sum()) > 0 else x


@pytest.mark.parametrize(
    ("model", "note"),
    [(Segmented(), ""), (Untraceable(), "BatchNorm is not folded: ")],
    ids=["traced", "not"],
)
def test_norms_are_folded_where_the_model_can_be_traced(model: nn.Module, note: str) -> None:
    model.eval()
    x = torch.rand(2, 3, 32, 32)
    folded, said = torch_network.folded(Task(model, x, "fp32"), "nhwc")
    assert said.startswith(note) and bool(said) == bool(note)
    assert any(isinstance(layer, nn.BatchNorm2d) for layer in folded.modules()) == bool(note)
    with torch.no_grad():
        for found, wanted in zip(tensors(folded(x)), tensors(model(x)), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_what_is_no_tensor_is_no_result() -> None:
    one, two = torch.ones(1), torch.ones(2)
    assert tensors({"out": one, "more": (None, [two])}) == [one, two] and tensors(one) == [one]
