"""Losses that keep constants, share the model, or read values that change; the caller's own stay as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import escalade
from tests.engine.training.test_loops import Batch, follow

_CACHE: dict[str, Any] = {}
_WEIGHT = 1.0


@pytest.fixture(autouse=True)
def _globals() -> Iterator[None]:
    global _WEIGHT
    yield
    _CACHE.clear()
    _WEIGHT = 1.0


def _batches(count: int = 3) -> list[Batch]:
    return [(torch.randn(2, 5, 4), torch.randn(2, 5, 4)) for _ in range(count)]


def _mask(y: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(y.shape[1], device=y.device)
    return (positions % 2).float()[:, None].mul_(2) + 1


class _Positions(nn.Module):
    """A layer that computes a table at its first call, and keeps it; its buffer is assigned at every call."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.table: torch.Tensor | None = None
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = _mask(x)
        self.seen = self.seen + 1
        return self.layer(x * self.table)


class _Masked:
    """A loss that keeps a mask and the losses that it has returned."""

    def __init__(self) -> None:
        self.mask: torch.Tensor | None = None
        self.returned: list[torch.Tensor] = []

    def __call__(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = _mask(y)
        self.returned.append(loss := F.mse_loss(y * self.mask, target))
        return loss


def _globally_masked(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if "mask" not in _CACHE:
        _CACHE["mask"] = _mask(y)
    return F.mse_loss(y * _CACHE["mask"], target)


def _locally_masked() -> Callable[..., torch.Tensor]:
    kept: list[torch.Tensor] = []

    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.append(_mask(y))
        return F.mse_loss(y * kept[0], target)

    return loss


def _has_tensors(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, list | dict) and len(value) > 0)


@pytest.mark.parametrize("loss", [_Masked, lambda: _globally_masked, _locally_masked])
def test_a_loss_that_keeps_constants_is_left_as_it_was(loss: Any) -> None:
    torch.manual_seed(0)
    own = loss()
    model, batch = nn.Linear(4, 4), _batches(1)[0]
    escalade.training_step(model, own, torch.optim.SGD(model.parameters(), 0.1), batch)
    kept = [cell.cell_contents for cell in getattr(own, "__closure__", None) or ()]
    assert not any(map(_has_tensors, (*vars(own).values(), *kept, _CACHE)))
    follow(nn.Linear(4, 4), _batches(), loss())


def test_a_model_that_keeps_constants_is_left_as_it_was() -> None:
    torch.manual_seed(0)
    model = _Positions()
    follow(model, _batches(), F.mse_loss)
    assert model.table is None


@pytest.mark.parametrize("draws", [torch.rand, torch.ones])
def test_kept_random_numbers_are_no_constants(draws: Any) -> None:
    """PyTorch's loop draws them once, and a step would draw them at every call."""
    kept: list[torch.Tensor] = []

    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if not kept:
            kept.append(draws(4))
        return F.mse_loss(y * kept[0], target)

    model, batch = nn.Linear(4, 4), _batches(1)[0]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if draws is torch.ones:
        escalade.training_step(model, loss, optimizer, batch)
        return
    with pytest.raises(escalade.EscaladeError, match="something else each time"):
        escalade.training_step(model, loss, optimizer, batch)


def test_constants_that_change_are_not_taken_for_kept_ones() -> None:
    """Both runs compute a constant of the same shape, from a counter."""
    runs = [0]

    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        runs[0] += 1
        return F.mse_loss(y * torch.full((4,), float(runs[0])), target)

    model = nn.Linear(4, 4)
    with pytest.raises(escalade.EscaladeError, match="something else each time"):
        escalade.training_step(model, loss, torch.optim.SGD(model.parameters(), 0.1), _batches(1)[0])
    assert runs == [0]


class _Penalized(nn.Module):
    """A model with a loss that is a method of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def loss(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(y, target) + 0.1 * self.layer.weight.square().sum()


def test_a_loss_may_read_the_model_that_it_holds() -> None:
    torch.manual_seed(0)
    model = _Penalized()
    before = model.layer.weight.detach().clone()
    weights: list[torch.Tensor] = []
    for loss in (model.loss, lambda y, t: F.mse_loss(y, t) + 0.1 * model.layer.weight.square().sum()):
        with torch.no_grad():
            model.layer.weight.copy_(before)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x, target = torch.ones(2, 4), torch.zeros(2, 4)
        step = escalade.training_step(model, loss, optimizer, (x, target))
        model.layer.weight.grad = None
        right = loss(model(x), target)
        (wanted,) = torch.autograd.grad(right, [model.layer.weight])
        torch.testing.assert_close(step(x, target), right.detach())
        torch.testing.assert_close(model.layer.weight.detach(), before - 0.1 * wanted)
        weights.append(model.layer.weight.detach().clone())
    assert not torch.equal(weights[0], before)


class _Weighted:
    weight = 1.0

    def __init__(self) -> None:
        self.own = 1.0

    def __call__(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.own * F.mse_loss(y, target)


def test_values_that_a_loss_reads_may_change() -> None:
    global _WEIGHT
    torch.manual_seed(0)
    local, settings, weighted = 1.0, {"weight": 1.0}, _Weighted()

    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return local * settings["weight"] * _WEIGHT * weighted(y, target)

    x, target = torch.ones(2, 4), torch.zeros(2, 4)
    losses = []
    for own in (loss, weighted, weighted.__call__):
        local, settings["weight"], _WEIGHT, weighted.own = 1.0, 1.0, 1.0, 1.0
        model = nn.Linear(4, 4)
        step = escalade.training_step(model, own, torch.optim.SGD(model.parameters(), 0.0), (x, target))
        once = float(step(x, target))
        weighted.own = 2.0
        assert float(step(x, target)) == pytest.approx(2 * once)
        if own is loss:
            local = 3.0
            assert float(step(x, target)) == pytest.approx(6 * once)
            settings["weight"] = 5.0
            assert float(step(x, target)) == pytest.approx(30 * once)
            with pytest.warns(UserWarning, match="reads _WEIGHT, which has changed 4 times"):
                _WEIGHT = 7.0
                losses.append(float(step(x, target)))
            assert losses == [pytest.approx(210 * once)]


def test_an_unchanged_loss_is_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else changes in what it holds."""
    weighted, other = _Weighted(), {"calls": [0]}

    def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        assert other
        return weighted(y, target)

    model, batch = nn.Linear(4, 4), _batches(1)[0]
    step = escalade.training_step(model, loss, torch.optim.SGD(model.parameters(), 0.1), batch)
    monkeypatch.setattr(type(step), "_make_plan", None)
    for number in range(3):
        weighted.unused = number  # type: ignore[attr-defined]
        other["calls"][0] = number
        step(*batch)
