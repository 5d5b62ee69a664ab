"""Scaled training steps against `torch.amp.GradScaler`: skipped steps, growth, parameter groups, resumed runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import escalade

STEPS = 9
RESUMED = 5
"""The step before which everything is loaded into new objects."""
SPOILED = {2: 0, 6: 1}
"""Steps with a non-finite input of one branch, and that branch."""
FIRST_SCALE, GOOD_STEPS = 8.0, 1998
"""Two steps before the scale grows: GradScaler doubles it after 2,000 good steps."""
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}, {"weight_decay": 0.2}),
    "damped": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}, {"momentum": 0.5, "dampening": 0.1}),
    "nesterov": (
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1, "maximize": True},
        {"nesterov": False, "weight_decay": 0.3},
    ),
    "adam": (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}, {"betas": (0.5, 0.9), "weight_decay": 0.2}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True, "eps": 1e-3}, {"maximize": True, "eps": 1e-2}),
    "nadam": (torch.optim.NAdam, {"lr": 0.1}, {"weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}, {"weight_decay": 0.5}),
}  # fmt: skip
"""Optimizers: settings at the start, and what is changed in the middle."""
ONE_GROUP = ("sgd", "adam")


class _Branches(nn.Module):
    """Two branches without common parameters, so that the gradient of one can overflow alone."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(2, 3, 2), nn.Conv2d(2, 3, 2)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x), self.right(y)


def _loss(made: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    return (made[0] - target).square().mean() + (made[1] + target).square().mean()


def _made(kind: str, device: torch.device) -> tuple[_Branches, torch.optim.Optimizer]:
    """Weights in channels_last, and one group per branch, or one group for both."""
    optimizer, settings, _ = KINDS[kind]
    model = _Branches().to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
    groups = [{"params": model.left.parameters()}, {"params": model.right.parameters(), "lr": 0.05}]
    if kind in ONE_GROUP:
        groups = [{"params": model.parameters()}]
    return model, optimizer(groups, **settings)


def _batch(number: int, device: torch.device) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    x, y, target = torch.randn(2, 2, 4, 4), torch.randn(2, 2, 4, 4), torch.randn(2, 3, 3, 3)
    if number in SPOILED:
        (x, y)[SPOILED[number]][1, 0, 2, 3] = (torch.nan, torch.inf)[SPOILED[number]]
    return (x.to(device), y.to(device)), target.to(device)


def _assert_same(mine: Any, theirs: Any) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


def _course(kind: str, device: torch.device) -> None:
    torch.manual_seed(0)
    model, own = _made(kind, device)
    expected, theirs = _made(kind, device)
    expected.load_state_dict(model.state_dict())
    scaler = torch.amp.GradScaler(device.type, init_scale=FIRST_SCALE)
    scaler.load_state_dict(scaler.state_dict() | {"_growth_tracker": GOOD_STEPS})
    step = escalade.training_step(model, _loss, own, _batch(0, device), loss_scale=FIRST_SCALE)
    step.load_state_dict({"scale": FIRST_SCALE, "good_steps": GOOD_STEPS})
    for number in range(STEPS):
        if number == RESUMED:
            saved = copy.deepcopy((model.state_dict(), own.state_dict(), step.state_dict()))
            model, own = _made(kind, device)
            step = escalade.training_step(model, _loss, own, _batch(0, device), loss_scale=1.0)
            model.load_state_dict(saved[0])
            own.load_state_dict(saved[1])
            step.load_state_dict(saved[2])
        for optimizer in (own, theirs):
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
                if number == STEPS - 2:
                    group.update(KINDS[kind][2])
        batch = _batch(number, device)
        theirs.zero_grad()
        loss = _loss(expected(*batch[0]), batch[1])
        scaler.scale(loss).backward()
        scaler.step(theirs)
        scaler.update()
        _assert_same(step(*batch), loss.detach())
        _assert_same(model.state_dict(), expected.state_dict())
        kept = scaler.state_dict()
        assert step.state_dict() == {"scale": kept["scale"], "good_steps": kept["_growth_tracker"]}, number
        assert step.loss_scale == kept["scale"]
        if number in (1, 2, RESUMED - 1, STEPS - 1):
            _assert_same(own.state_dict()["state"], theirs.state_dict()["state"])
    assert scaler.get_scale() == FIRST_SCALE * 2 / 2 / 2


@pytest.mark.parametrize("kind", KINDS)
def test_scaled_steps_are_those_of_gradscaler(kind: str) -> None:
    _course(kind, torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["nesterov", "amsgrad"])
def test_scaled_steps_on_the_gpu_are_those_of_gradscaler(kind: str, cuda: torch.device) -> None:
    _course(kind, cuda)


class _WithNothing(nn.Module):
    """A layer, and a parameter without elements that the loss depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing, self.layer = nn.Parameter(torch.empty(0)), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x) + self.nothing.sum()
        return y


def test_a_parameter_without_elements_is_left_alone() -> None:
    torch.manual_seed(0)
    model = _WithNothing()
    expected = copy.deepcopy(model)

    def optimizer_of(one: _WithNothing) -> torch.optim.Optimizer:
        groups: list[dict[str, Any]] = [{"params": [one.nothing]}, {"params": one.layer.parameters()}]
        return torch.optim.SGD(groups, 0.1, 0.9)

    own, theirs = optimizer_of(model), optimizer_of(expected)
    x, target = torch.randn(2, 3), torch.randn(2, 3)
    step = escalade.training_step(model, nn.functional.mse_loss, own, (x, target), loss_scale=8.0)
    step(x * torch.inf, target)
    assert step.loss_scale == 4.0
    for _ in range(2):
        theirs.zero_grad()
        nn.functional.mse_loss(expected(x), target).backward()
        theirs.step()
        step(x, target)
    _assert_same(model.state_dict(), expected.state_dict())
