"""Element moves, and operators written as calls of others, on the GPU."""

from __future__ import annotations

import pytest
import torch

import escalade
from tests.engine.nodes.test_ranks import COMPOSED
from tests.engine.plan.test_moves import MOVING
from tests.engine.plan.test_subbuffers import Joined, Model

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


@pytest.mark.parametrize("name", COMPOSED)
def test_composed_operators_are_pytorchs(name: str, cuda: torch.device) -> None:
    function, shape = COMPOSED[name]
    for dtype in (torch.float16, torch.float32):
        x = torch.randn(shape, device=cuda, dtype=dtype)
        exact = function(x.double().sin())
        engine = escalade.compile(Model(lambda x: function(x.sin())), x, dtype=dtype)
        assert not engine.explain(x).fallbacks
        most = 4 * torch.finfo(dtype).eps * float(exact.abs().max())  # up to eight roundings, one per step
        torch.testing.assert_close(engine(x).double(), exact, rtol=0, atol=most)


def test_concatenations_expand_operands_and_read_constants(cuda: torch.device) -> None:
    model, x = Joined().eval().to(cuda), torch.randn(2, 8, 3, 4, device=cuda)
    for dtype, tolerance in (("fp32", 1e-5), ("fp16", 1e-2)):
        engine = escalade.compile(model, x, dtype=dtype)
        assert not engine.explain(x).fallbacks
        for given in (x, x[:1], x):
            torch.testing.assert_close(engine(given), model(given), rtol=tolerance, atol=tolerance)
