"""Models and losses with Python of their own: kept constants, values that change, checks, and writes to weights.

The caller's objects stay as they are.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Distribution, MultivariateNormal, Normal, kl_divergence

import escalade
from escalade.engine.capture.export_context import export_context
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
        return self.layer((x + 1).mul_(self.table))


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
    """Changes of values that it does not read make no difference."""
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


class _Variational(nn.Module):
    """An autoencoder whose code is drawn from a distribution."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(4, 6), nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mean, deviation = self.encoder(x).chunk(2, -1)
        code = Normal(mean, deviation.exp())
        prior = Normal(torch.zeros_like(mean), torch.ones_like(mean))
        return self.decoder(code.rsample()), kl_divergence(code, prior).mean()


def _policy_gradient(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    actions = Categorical(logits=y)
    return -(actions.log_prob(target.argmax(-1)) * target[..., 0]).mean() - 0.1 * actions.entropy().mean()


def _regularized(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    covariance = y[0].t() @ y[0] + torch.eye(4)
    return torch.linalg.inv(covariance).trace() + MultivariateNormal(y, covariance).log_prob(target).mean()


class _Causal(nn.Module):
    """A transformer that PyTorch would look at to see whether its mask is causal."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x, mask=nn.Transformer.generate_square_subsequent_mask(x.shape[1]))


@pytest.mark.parametrize(
    ("make", "loss"),
    [
        (_Variational, lambda y, t: F.mse_loss(y[0], t) + y[1]),
        (lambda: nn.Linear(4, 4), _policy_gradient),
        (lambda: nn.Linear(4, 4), lambda y, t: F.gaussian_nll_loss(y, t, y[..., :1].exp(), full=True)),
        (lambda: nn.Linear(4, 4), lambda y, t: nn.GaussianNLLLoss(reduction="sum")(y, t, t.exp())),
        (lambda: nn.Linear(4, 4), _regularized),
        (_Causal, F.mse_loss),
    ],
)
def test_checks_of_values_are_skipped(make: Any, loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own: a step does not wait for values."""
    torch.manual_seed(0)
    monkeypatch.setattr(Distribution, "_validate_args", True)  # `torch.compile` turns it off for the process
    follow(make(), _batches(), loss)
    with pytest.raises(ValueError, match="negative"):  # outside of a step they are made
        F.gaussian_nll_loss(torch.ones(3), torch.ones(3), -torch.ones(3))
    with pytest.raises(ValueError, match="constraint"):
        Normal(torch.zeros(1), -torch.ones(1))


def test_one_capture_may_contain_another() -> None:
    negative = -torch.ones(3)
    with export_context(), export_context():
        F.gaussian_nll_loss(negative, negative, negative)
    with pytest.raises(ValueError, match="negative"):
        F.gaussian_nll_loss(negative, negative, negative)


def test_engines_of_causal_transformers() -> None:
    torch.manual_seed(0)
    model, x = _Causal().eval(), torch.randn(2, 5, 4)
    torch.testing.assert_close(escalade.compile(model, x)(x), model(x).detach())


class _Bounded(nn.Linear):
    """A layer that keeps its rows within a norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.3)
        return super().forward(x)


class _MaskedLinear(nn.Linear):
    """A layer with a triangular weight, some rows of which are frozen elsewhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data *= torch.ones_like(self.weight).tril()
        with torch.no_grad():
            self.bias.clamp_(-0.1, 0.1)
        return super().forward(x)


class _Halved(nn.Linear):
    """A layer whose weight also decays by itself, and whose frozen bias grows."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__(rows, columns)
        self.bias.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.mul_(0.5)
        self.bias.data = self.bias.data + 1
        return super().forward(x)


@pytest.mark.parametrize("layer", [_Bounded, _MaskedLinear, _Halved])
@pytest.mark.parametrize("given", [{}, {"device": "twin"}, {"dtype": "bf16"}, {"accumulate": 2}], ids=str)
def test_models_may_write_to_their_weights(layer: Any, given: dict[str, Any]) -> None:
    """Before the optimizer reads them, and also in calls that only accumulate gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(layer(4, 4), nn.ReLU(), nn.Linear(4, 4))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    if "accumulate" in given:
        step = escalade.training_step(
            model, F.mse_loss, torch.optim.SGD(model.parameters(), 0.0), _batches(1)[0], **given
        )
        expected = nn.Sequential(layer(4, 4), nn.ReLU(), nn.Linear(4, 4))
        expected.load_state_dict(model.state_dict())
        for batch in _batches(3):
            step(*batch)
            expected(batch[0])
        torch.testing.assert_close(model.state_dict(), expected.state_dict())
    else:
        close = 1e-2 if "dtype" in given else 1e-5
        follow(model, _batches(), F.mse_loss, close=close, **given)
    assert not torch.equal(next(model.parameters()), before[0])


@dataclasses.dataclass
class _Labels:
    rows: torch.Tensor
    weight: float


class _Heads(nn.Module):
    """A model of a dict and a number, with one result per head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(4, 6), nn.ModuleDict({name: nn.Linear(6, 4) for name in "ab"})

    def forward(self, batch: dict[str, Any], times: int = 1) -> dict[str, torch.Tensor]:
        y = F.relu(self.body(batch["x"] + batch["more"][0])) * times
        return {name: head(y) for name, head in self.heads.items()}


def _loss_of_heads(
    y: dict[str, torch.Tensor], targets: dict[str, Any], labels: _Labels, kind: str
) -> torch.Tensor:
    of = {"l1": F.l1_loss, "mse": F.mse_loss}[kind]
    return of(y["a"], targets["a"]) + of(y["b"], targets["b"][0]) + labels.weight * of(y["a"], labels.rows)


@pytest.mark.parametrize("device", ["cpu", "twin"])
def test_arguments_may_be_containers(device: str) -> None:
    torch.manual_seed(0)
    model = _Heads()
    expected = copy.deepcopy(model)
    own, theirs = (torch.optim.SGD(one.parameters(), 0.1) for one in (model, expected))
    step = None
    for times, weight, kind in (
        (1, 0.5, "mse"),
        (1, 0.5, "mse"),
        (2, 0.5, "mse"),
        (2, 0.25, "l1"),
        (1, 0.5, "mse"),
    ):
        x, more, a, b, rows = torch.randn(5, 3, 4)
        batch = {"x": x, "more": [more, None]}
        targets = {"a": a, "b": (b, "unused")}, _Labels(rows, weight), kind
        step = step or escalade.training_step(
            model, _loss_of_heads, own, ((batch, times), *targets), device=None if device == "cpu" else device
        )
        theirs.zero_grad()
        loss = _loss_of_heads(expected(batch, times), *targets)
        loss.backward()
        theirs.step()
        torch.testing.assert_close(step((batch, times), *targets), loss.detach())
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
    assert step is not None
    with pytest.raises(escalade.EscaladeError, match="a set among arguments"):
        step((batch, 1), {rows})
    with pytest.raises(escalade.EscaladeError, match="was called with str"):
        step("rows")
