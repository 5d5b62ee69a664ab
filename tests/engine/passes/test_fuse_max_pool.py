"""Pools fused into the convolution before them: where it is faster, where it is not allowed, in engines and steps."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import escalade
from escalade.engine.plan.plan import Plan


def _pooled(plan: Plan) -> list[str]:
    """Names of a plan's convolutions with a fused max pool."""
    problems = (step.lowered.problem.name for step in plan.steps if step.lowered is not None)
    return [name for name in problems if "pool" in name]


def _model(behind: Callable[[torch.Tensor], torch.Tensor], filters: int = 192) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv2d(3, filters, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return behind(self.convolution(x))

    return Model()


def test_an_engine_fuses_a_pool_if_its_input_has_no_other_reader() -> None:
    x = torch.rand(4, 3, 17, 16)
    model = _model(lambda y: F.max_pool2d(F.relu(y), 2)).eval()
    engine = escalade.compile(model, x, dtype="fp32", device="cpu")
    assert _pooled(engine.plan(x)) == ["3to192_17x16_k3s1_b4_bias+relu+pool2"]
    torch.testing.assert_close(engine(x), model(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "behind",
    [
        lambda y: F.max_pool2d(F.relu(y), 3, 2),
        lambda y: F.max_pool2d(F.relu(y), 2, ceil_mode=True),
        lambda y: F.max_pool2d(F.relu(y), 3),
        lambda y: (lambda z: (F.max_pool2d(z, 2), z))(F.relu(y)),
        lambda y: (lambda z: (F.max_pool2d(z, 2), z.mean((2, 3))))(F.relu(y)),
    ],
    ids=["overlapping", "over the edge", "of three", "returned too", "read twice"],
)
def test_other_pools_stay(behind: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.rand(4, 3, 17, 16)
    assert not _pooled(escalade.compile(_model(behind).eval(), x, dtype="fp32", device="cpu").plan(x))


def test_a_step_never_overwrites_a_pool_input() -> None:
    """Its gradient uses the argmax indices that the convolution writes."""
    torch.manual_seed(0)
    model = _model(lambda y: F.max_pool2d(F.relu(y), 2)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    expected = copy.deepcopy(model)
    own, theirs = (torch.optim.SGD(one.parameters(), 0.5) for one in (model, expected))
    x, target = torch.rand(4, 3, 16, 16), torch.rand(4, 192, 8, 8)
    step = escalade.training_step(model, F.mse_loss, own, (x, target), dtype="fp32", device="twin")
    loss = F.mse_loss(expected(x), target)
    loss.backward()
    theirs.step()
    torch.testing.assert_close(step(x, target), loss.detach())
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
    assert _pooled(step.plan) == ["3to192_16_k3s1_b4_bias+relu+pool2+places"]
    made = {one.node.name: number for number, one in enumerate(step.plan.steps)}
    first = {one.name: one.first for one in step.plan.lifetimes}
    beside = {one.node.name: one.side_output.node for one in step.plan.steps if one.side_output is not None}
    assert beside and all(first[name] == made[maker] for name, maker in beside.items())
