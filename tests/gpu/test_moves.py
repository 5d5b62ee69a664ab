"""What only moves elements, on the GPU: the same elements as PyTorch's."""

from __future__ import annotations

import pytest
import torch

import escalade
from tests.engine.plan.test_moves import MOVING
from tests.engine.plan.test_subbuffers import Model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", MOVING)
def test_movements_are_pytorchs(name: str, cuda: torch.device) -> None:
    forward, shape, _ = MOVING[name]
    for dtype in (torch.float16, torch.float32):
        x = torch.randn(2, *shape, device=cuda, dtype=dtype)
        engine = escalade.compile(Model(forward), x, dtype=dtype)
        torch.testing.assert_close(engine(x), forward(x))
        assert not engine.explain(x).fallbacks


@pytest.mark.parametrize("order", [(0, 2, 1), (2, 0, 1), (2, 1, 0), (1, 0, 2)])
def test_permutations_of_many_tiles_are_pytorchs(order: tuple[int, ...], cuda: torch.device) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(torch.softmax(x, -1).permute(order), -1)

    for sizes in ((2, 196, 512), (3, 130, 77)):
        x = torch.randn(sizes, device=cuda, dtype=torch.float16)
        torch.testing.assert_close(escalade.compile(Model(forward), x, dtype="fp16")(x), forward(x))
