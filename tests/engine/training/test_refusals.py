"""Models that no training step supports: refused with a sentence, and nothing is changed."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import escalade
from escalade.errors import EscaladeError, UnsupportedError


class _Layer(nn.Module):
    """A linear layer with a side effect."""

    kept: torch.Tensor

    def __init__(self, beside: Callable[[_Layer, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.beside, self.count = nn.Linear(4, 3), beside, 0
        self.table = nn.Embedding(2, 1, sparse=True)
        self.register_buffer("kept", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.beside(self, self.layer(x))


def _counting(layer: _Layer, y: torch.Tensor) -> torch.Tensor:
    layer.count += 1
    return y * layer.count


def _growing(layer: _Layer, y: torch.Tensor) -> torch.Tensor:
    layer.kept = torch.cat([layer.kept, layer.kept])
    return y


def _setting_data(layer: _Layer, y: torch.Tensor) -> torch.Tensor:
    layer.kept.data = y.detach()
    return y


@pytest.mark.parametrize(
    ("beside", "words"),
    [
        (_counting, "something else each time"),
        (lambda _, y: y * random.random(), "something else each time"),
        (_growing, "buffer kept"),
        (_setting_data, "sets the data of its kept"),
        (lambda _, y: y if y.sum() > 0 else -y, "branches on the values"),
        (lambda layer, y: y * layer.table(torch.tensor([0])), "sparse=False"),
    ],
)
def test_models_that_no_plan_can_follow(beside: Any, words: str) -> None:
    model = _Layer(beside)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    drawn = random.getstate()
    with pytest.raises(EscaladeError, match=words):
        escalade.training_step(model, F.mse_loss, optimizer, (torch.rand(2, 4), torch.rand(2, 3)))
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert (model.count, optimizer.state_dict()["state"]) == (0, {})
    assert random.getstate() == drawn


def _tied(model: nn.Sequential) -> torch.optim.Optimizer:
    model[1].weight.data = model[0].weight.data
    return torch.optim.SGD(model.parameters(), 0.1)


def _with_hooked_gradients(model: nn.Sequential) -> torch.optim.Optimizer:
    next(model.parameters()).register_hook(lambda gradient: gradient * 2)
    return torch.optim.SGD(model.parameters(), 0.1)


@pytest.mark.parametrize(
    ("optimiser", "words"),
    [
        (_tied, "share memory"),
        (lambda model: torch.optim.LBFGS(model.parameters()), "takes no closure"),
        (_with_hooked_gradients, "gradient hooks"),
        (lambda _: torch.optim.SGD(nn.Linear(2, 2).parameters(), 0.1), "none of the parameters"),
    ],
)
def test_optimisers_that_do_something_else(optimiser: Any, words: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = optimiser(model)
    with pytest.raises(UnsupportedError, match=words):
        escalade.training_step(model, F.mse_loss, optimizer, (torch.rand(2, 4), torch.rand(2, 4)))


def test_losses_scales_and_batches_that_no_step_takes() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, target = torch.rand(2, 4), torch.rand(2, 3)
    make: Any = escalade.training_step
    weight = model.weight
    with pytest.raises(EscaladeError, match="reads a parameter of"):
        make(model, lambda y, t: F.mse_loss(y, t) + weight.square().sum(), optimizer, (x, target))
    with pytest.raises(UnsupportedError, match="pass a function"):
        make(model, 3, optimizer, (x, target))
    for scale in (0, -1.0, float("inf"), "many"):
        with pytest.raises(UnsupportedError, match="above 0"):
            make(model, F.mse_loss, optimizer, (x, target), loss_scale=scale)
    with pytest.raises(UnsupportedError, match="lazy parameters"):
        make(nn.LazyLinear(3), F.mse_loss, optimizer, (x, target))
    norm = nn.BatchNorm1d(3)
    with pytest.raises(EscaladeError, match=r"pass a loss with modules in it as a torch\.nn\.Module"):
        make(model, lambda y, t: F.mse_loss(norm(y), t), optimizer, (x, target))
    assert norm.num_batches_tracked == 0
    step = make(model, F.mse_loss, optimizer, (x, target))
    for wrong in (x[:0], x.to_sparse(), x.to("meta")):
        with pytest.raises(UnsupportedError, match="dense tensors"):
            step(wrong, target)
    with pytest.raises(UnsupportedError, match=r"model\.state_dict"):
        pickle.dumps(step)
    handle = model.weight.register_hook(lambda gradient: gradient)
    with pytest.raises(UnsupportedError, match="gradient hooks"):
        step(x, target)
    handle.remove()
    step(x, target)
