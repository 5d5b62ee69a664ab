"""Training steps of small models with layers and Python of many kinds: three steps are PyTorch's own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical

import escalade
from tests.engine.training.test_update import halved

pytestmark = pytest.mark.gpu

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class _Sequences(nn.Module):
    """A recurrent layer whose results and last states reach the loss."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.LazyLinear(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, last = self.layer(x)
        lasts = last if isinstance(last, tuple) else (last,)
        return self.head(y) + sum(one.float().mean() for one in lasts)


class _Bounded(nn.Conv2d):
    """A convolution that keeps its filters within a norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.5)
        return super().forward(x)


class _Rows(nn.Module):
    """A convolution whose pixels are compared in PyTorch's order of rows, and read by another convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.first(x).permute(0, 2, 3, 1)
        return self.second(rows.permute(0, 3, 1, 2)), F.mse_loss(rows, torch.full_like(rows, 0.5))


def _ctc(y: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    steps, batch = y.shape[:2]
    lengths = torch.full((batch,), targets.shape[1], device=y.device)
    return F.ctc_loss(y.float().log_softmax(-1), targets, torch.full_like(lengths, steps), lengths)


def _policy_gradient(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    actions = Categorical(logits=y)
    return -(actions.log_prob(target.argmax(-1)) * target[..., 0]).mean() - 0.1 * actions.entropy().mean()


def _spectrum(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The singular values come from an operator that waits for the GPU, which no CUDA graph can contain."""
    matrix = y.flatten(0, -2)
    return torch.linalg.svdvals(matrix).sum() / matrix.shape[0] + F.mse_loss(y, target)


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def _sequence_batch() -> tuple[torch.Tensor, ...]:
    return torch.randn(9, 4, 6), torch.randn(9, 4, 5)


def _image_batch() -> tuple[torch.Tensor, ...]:
    return torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 8)


@dataclass(frozen=True)
class _Case:
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[torch.Tensor, ...]] = _sequence_batch
    loss: Callable[..., torch.Tensor] = F.mse_loss
    optimizer: Make = _sgd


def _sequences(kind: Any, *sizes: int, **given: Any) -> Callable[[], nn.Module]:
    return lambda: _Sequences(kind(6, *sizes, **given))


_linear = partial(nn.Linear, 6, 5)
_CASES = {
    "lstm": _Case(_sequences(nn.LSTM, 8, 2, bidirectional=True)),
    "projections": _Case(_sequences(nn.LSTM, 8, 2, proj_size=4)),
    "gru": _Case(_sequences(nn.GRU, 8, 2, bias=False)),
    "odd rnn": _Case(_sequences(nn.RNN, 7, nonlinearity="relu")),
    "ctc": _Case(_sequences(nn.LSTM, 8), lambda: (torch.randn(9, 4, 6), torch.randint(1, 5, (4, 3))), _ctc),
    "policy gradient": _Case(_linear, loss=_policy_gradient),
    "spectrum": _Case(_linear, loss=_spectrum),
    "gaussian": _Case(_linear, loss=lambda y, t: F.gaussian_nll_loss(y, t, y[..., :1].exp())),
    "bounded": _Case(
        lambda: nn.Sequential(_Bounded(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 1)), _image_batch
    ),
    "rows": _Case(_Rows, _image_batch, lambda y, t: F.mse_loss(y[0], t) + y[1]),
    "adagrad": _Case(_linear, optimizer=partial(torch.optim.Adagrad, lr=0.1)),
    "nadam": _Case(_linear, optimizer=partial(torch.optim.NAdam, lr=0.01)),
    "hooks": _Case(_linear, optimizer=halved),
}


def _course(case: _Case, home: torch.device, **given: Any) -> None:
    torch.manual_seed(0)
    model = case.model()
    model(case.batch()[0])  # gives lazy layers their shapes
    model = model.to(home)
    expected = copy.deepcopy(model)
    own, theirs = case.optimizer(model.parameters()), case.optimizer(expected.parameters())
    batches = [tuple(one.to(home) for one in case.batch()) for _ in range(3)]
    step = escalade.training_step(model, case.loss, own, batches[0], **given)
    for x, *rest in batches:
        theirs.zero_grad()
        loss = case.loss(expected(x), *rest)
        loss.backward()
        theirs.step()
        torch.testing.assert_close(step(x, *rest), loss.detach(), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-2, atol=1e-3)
    step(*batches[0])  # the process goes on, with its random numbers
    assert torch.rand(3, device=home).isfinite().all()


@pytest.mark.filterwarnings("ignore:operators of PyTorch in this plan")
@pytest.mark.parametrize("name", _CASES)
def test_steps_are_pytorchs(name: str, cuda: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    for arithmetic in (torch.backends.cudnn, torch.backends.cuda.matmul):
        monkeypatch.setattr(arithmetic, "allow_tf32", False)
    _course(_CASES[name], cuda)


@pytest.mark.parametrize("name", ["adagrad", "lstm"])
def test_steps_are_pytorchs_when_they_accumulate_and_scale(name: str, cuda: torch.device) -> None:
    """Only that they run: in mixed precision, with a loss scale, an accumulated gradient, and a bounded norm."""
    case = _CASES[name]
    model = case.model().to(cuda)
    batch = tuple(one.to(cuda) for one in case.batch())
    model(batch[0])
    optimizer = case.optimizer(model.parameters())
    step = escalade.training_step(
        model, case.loss, optimizer, batch, dtype="fp16", accumulate=2, clip_norm=1.0, loss_scale=64.0
    )
    losses = [float(step(*batch)) for _ in range(40)]
    assert losses[-1] < losses[0] and step.skipped_steps == 0
