"""Changes between training steps, and other optimizers' steps: results match a PyTorch loop."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import escalade
from escalade import models
from escalade.engine.capture.joint import capture_step
from escalade.engine.training import step as step_module
from escalade.errors import EscaladeError

Change = Callable[[nn.Sequential, torch.optim.Optimizer], Any]


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Hardtanh(), nn.Linear(4, 3))


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    betas: Any = (torch.tensor(0.9), torch.tensor(0.99))
    return torch.optim.Adam(model.parameters(), torch.tensor(0.05), betas=betas, foreach=False)


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(2, 4), torch.randn(2, 3)


def _plain(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    x: torch.Tensor,
    target: torch.Tensor,
    loss: Any = F.mse_loss,
) -> torch.Tensor:
    optimizer.zero_grad()
    found: torch.Tensor = loss(model(x), target)
    found.backward()
    optimizer.step()
    return found.detach()


def _assert_same(mine: Any, theirs: Any) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def _moves(model: nn.Sequential, _: Any) -> None:
    for one in model.parameters():
        one.data = one.data * 0.5


def _replaces(model: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    model[2] = copy.deepcopy(model[2])
    optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.1})


def _zeroes_counts(_: Any, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"].zero_()


def _loads(_: Any, optimizer: torch.optim.Optimizer) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for one in state["state"].values():
        one["exp_avg"] *= 3
    optimizer.load_state_dict(state)


def _freezes_or_thaws(model: nn.Sequential, _: Any) -> None:
    """Parameters of one group have then taken different numbers of steps."""
    for one in model[0].parameters():
        one.requires_grad_(not one.requires_grad)


def _replaces_mappings(_: Any, optimizer: torch.optim.Optimizer) -> None:
    for one in list(optimizer.state):
        optimizer.state[one] = {**optimizer.state[one], "exp_avg": optimizer.state[one]["exp_avg"] * 3}


def _replaces_entries(_: Any, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] * 3


_CHANGES: dict[str, Change] = {
    "tensors": _moves,
    "modules": _replaces,
    "gradients": _freezes_or_thaws,
    "settings": lambda model, _: setattr(model[1], "max_val", 0.1),
    "counts": _zeroes_counts,
    "state": _loads,
    "mappings": _replaces_mappings,
    "entries": _replaces_entries,
    "numbers": lambda _, optimizer: optimizer.param_groups[0]["betas"][0].fill_(0.5),
}


@pytest.mark.parametrize("change", _CHANGES.values(), ids=_CHANGES)
def test_changed_settings_are_adopted(change: Change) -> None:
    torch.manual_seed(0)
    model = _model()
    expected = copy.deepcopy(model)
    own, theirs = _adam(model), _adam(expected)
    step = escalade.training_step(model, F.mse_loss, own, _batch())
    for number in range(5):
        if number in (1, 3):
            change(model, own)
            change(expected, theirs)
        batch = _batch()
        _assert_same(step(*batch), _plain(expected, theirs, *batch))
    _assert_same(model.state_dict(), expected.state_dict())
    _assert_same(own.state_dict()["state"], theirs.state_dict()["state"])


_SETTINGS: dict[Any, tuple[dict[str, Any], tuple[dict[str, Any], ...]]] = {
    torch.optim.SGD: (
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        (
            {"lr": 0.02}, {"momentum": 0.5}, {"nesterov": True}, {"nesterov": False}, {"dampening": 0.4},
            {"weight_decay": 0.3}, {"maximize": True},
        ),
    ),
    torch.optim.Adam: (
        {"lr": 0.1, "weight_decay": 0.1},
        (
            {"lr": 0.02}, {"betas": (0.5, 0.999)}, {"betas": (0.5, 0.7)}, {"eps": 0.1}, {"weight_decay": 0.4},
            {"decoupled_weight_decay": True}, {"maximize": True},
        ),
    ),
}  # fmt: skip
"""Settings of an optimizer, and settings changed one at a time."""


@pytest.mark.parametrize("kind", _SETTINGS)
def test_every_setting_of_an_optimizer_is_read_anew(kind: Any) -> None:
    torch.manual_seed(0)
    model = _model()
    expected = copy.deepcopy(model)
    first, changes = _SETTINGS[kind]
    own, theirs = (kind(one.parameters(), **first) for one in (model, expected))
    step = escalade.training_step(model, F.mse_loss, own, _batch())
    for change in ({}, *changes):
        for optimizer in (own, theirs):
            optimizer.param_groups[0].update(change)
        batch = _batch()
        step(*batch)
        _plain(expected, theirs, *batch)
        _assert_same(model.state_dict(), expected.state_dict())


def test_settings_in_a_list_are_read_anew() -> None:
    torch.manual_seed(0)
    model = _model()
    expected = copy.deepcopy(model)
    own, theirs = (torch.optim.Adam(one.parameters(), 0.1) for one in (model, expected))
    betas: list[list[float]] = [[0.9, 0.99], [0.9, 0.99]]
    for optimizer, given in zip((own, theirs), betas, strict=True):
        optimizer.param_groups[0]["betas"] = given
    step = escalade.training_step(model, F.mse_loss, own, _batch())
    for _ in range(3):
        batch = _batch()
        step(*batch)
        _plain(expected, theirs, *batch)
        for one in betas:
            one[0] -= 0.2
    _assert_same(model.state_dict(), expected.state_dict())


def test_checks_before_a_launch_take_no_python_per_parameter() -> None:
    """A graph of a small network takes the GPU less time than a few hundred Python calls."""
    calls = []
    for layers in (2, 12):
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        x, target = torch.randn(2, 4), torch.randn(2, 4)
        step = escalade.training_step(model, F.mse_loss, optimizer, (x, target))
        for _ in range(3):
            step(x, target)
        seen: list[str] = []
        step.program.run = lambda updates=True: None  # type: ignore[method-assign]
        sys.setprofile(
            lambda frame, event, _, seen=seen: seen.append(frame.f_code.co_name) if event == "call" else None  # type: ignore[misc]
        )
        try:
            step(x, target)
        finally:
            sys.setprofile(None)
        calls.append(seen)
    assert calls[0] == calls[1] and len(calls[0]) < 50


def test_the_callers_modes_capture_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    captured = []

    def capture(*arguments: Any, **named: Any) -> Any:
        captured.append(1)
        return capture_step(*arguments, **named)

    monkeypatch.setattr(step_module, "capture_step", capture)
    torch.manual_seed(0)
    model = models.FusedSpectralAutoencoder(8, 2, 4)
    expected = copy.deepcopy(model)
    own, theirs = (torch.optim.SGD(one.parameters(), 0.1, momentum=0.9) for one in (model, expected))
    x = torch.randn(3, 16)
    step = escalade.training_step(model, F.mse_loss, own, (x, x))
    modes: tuple[Any, ...] = (
        torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16), torch.enable_grad()
    )  # fmt: skip
    for mode in modes:
        target = x.clone().requires_grad_()
        with mode:
            for given in ((x, x), (x, x.clone()), (x, target)):
                loss = step(*given)
        assert not loss.requires_grad
        for _ in range(3):
            _plain(expected, theirs, x, x)
        model.eval()
        model(x)  # leaves no change in the model that a plan would depend on
    _assert_same(model.state_dict(), expected.state_dict())
    assert len(captured) == 1


def test_steps_of_one_optimiser_take_turns_and_may_be_dropped() -> None:
    torch.manual_seed(0)
    model = _model()
    expected = copy.deepcopy(model)
    own, theirs = _adam(model), _adam(expected)
    losses = (F.mse_loss, F.l1_loss)
    steps = [escalade.training_step(model, loss, own, _batch()) for loss in losses]
    for number in range(5):
        batch = _batch()
        if number == 4:
            steps.pop()
            gc.collect()
        _assert_same(steps[number % 2](*batch), _plain(expected, theirs, *batch, loss=losses[number % 2]))
    steps.clear()
    gc.collect()
    _assert_same(own.state_dict()["state"], theirs.state_dict()["state"])
    _assert_same(model.state_dict(), expected.state_dict())


def test_the_optimiser_has_state_of_steps_alone() -> None:
    """Failed and skipped steps do not count; and the first velocity is not damped."""
    torch.manual_seed(0)
    model = _model()
    expected = copy.deepcopy(model)
    own, theirs = (torch.optim.SGD(one.parameters(), 0.1, 0.9, dampening=0.5) for one in (model, expected))
    x, indices = torch.randn(2, 4), torch.tensor([0, 2])
    step = escalade.training_step(model, F.cross_entropy, own, (x, indices), loss_scale=8.0)
    with pytest.raises(EscaladeError):
        step(x, indices + 5)
    assert not own.state_dict()["state"]
    step(x * float("inf"), indices)
    assert not own.state_dict()["state"]
    for one, optimizer in (
        (model, own),
        (expected, theirs),
    ):  # by the optimizer itself, which creates its state
        _plain(one, optimizer, x, indices, loss=F.cross_entropy)
    for _ in range(3):
        _assert_same(step(x, indices), _plain(expected, theirs, x, indices, loss=F.cross_entropy))
    _assert_same(model.state_dict(), expected.state_dict())
    _assert_same(own.state_dict()["state"], theirs.state_dict()["state"])


def test_tensors_held_by_a_loss_are_read_again_after_changes() -> None:
    torch.manual_seed(0)
    model = _model()
    expected = copy.deepcopy(model)
    own, theirs = _adam(model), _adam(expected)
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    x, target = torch.randn(2, 4), torch.tensor([0, 2])
    step = escalade.training_step(model, loss, own, (x, target))
    for number in range(3):
        _assert_same(step(x, target), _plain(expected, theirs, x, target, loss=loss))
        assert loss.weight is not None
        if number == 0:
            loss.weight[0] = 5.0
        else:
            loss.weight = torch.tensor([1.0, 1.0, 7.0])


class _Assigning(nn.Module):
    """Assigns its buffer, and has two parameters that share one gradient."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.shifts = nn.ParameterList([torch.zeros(3), torch.ones(3)])
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x) * self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.mean()
        return y + self.shifts[0] + self.shifts[1]


def test_buffers_may_be_assigned_and_gradients_be_the_same() -> None:
    torch.manual_seed(0)
    model = _Assigning()
    expected = copy.deepcopy(model)
    own, theirs = _adam(model), _adam(expected)
    step = escalade.training_step(model, F.mse_loss, own, _batch())
    for _ in range(3):
        batch = _batch()
        _assert_same(step(*batch), _plain(expected, theirs, *batch))
    _assert_same(model.state_dict(), expected.state_dict())
