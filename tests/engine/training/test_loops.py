"""Training loops as users write them, step by step beside PyTorch's own loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import escalade
from escalade.engine.training import planned

Batch = tuple[torch.Tensor, ...]
Loss = Callable[..., torch.Tensor]


@pytest.fixture(autouse=True)
def runs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "CHECKS_PLANS", False)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.1, momentum=0.9)


def _images(size: int = 4) -> Batch:
    return torch.randn(size, 3, 6, 6), torch.randint(0, 5, (size,))


def _rows(size: int = 4) -> Batch:
    return torch.randn(size, 6), torch.randn(size, 3)


def _convolutions() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip


def _linear(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), *between, nn.Linear(8, 3))


def follow(
    model: nn.Module,
    batches: list[Batch],
    loss: Loss = F.cross_entropy,
    make: Callable[[nn.Module], torch.optim.Optimizer] = _sgd,
    *,
    close: float = 1e-5,
    between: Callable[[int, nn.Module, torch.optim.Optimizer], None] = lambda *_: None,
    **given: Any,
) -> Any:
    """Take the same steps as PyTorch's loop, with the same random numbers, and return the training step."""
    expected = copy.deepcopy(model)
    own, theirs = make(model), make(expected)
    step = escalade.training_step(model, loss, own, batches[0], **given)
    autocast = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(given.get("dtype", "fp32"))
    for number, (x, *rest) in enumerate(batches):
        between(number, model, own)
        between(number, expected, theirs)
        torch.manual_seed(number)
        theirs.zero_grad()
        with torch.autocast("cpu", autocast, enabled=autocast is not None):
            right = loss(expected(x), *rest)
        right.backward()
        theirs.step()
        torch.manual_seed(number)
        found = step(x, *rest)
        torch.testing.assert_close(found, right.detach(), rtol=close, atol=close)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=close, atol=close)
    torch.testing.assert_close(
        own.state_dict()["state"], theirs.state_dict()["state"], rtol=close, atol=close
    )
    return step


class _Tied(nn.Module):
    """An embedding tied to the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.embedding(x).mean(1)))


class _Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


class _Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(6, 8), _linear_body(), nn.Linear(8, 3)
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(checkpoint(self.body, self.first(x), use_reentrant=self._reentrant))


def _linear_body() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


class _Precisions(nn.Module):
    """Blocks with their own dtype: one without autocast, one with."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.exact, self.narrow = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        with torch.autocast(x.device.type, enabled=False):
            y = torch.tanh(self.exact(y.float()))
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.narrow(y).float()


def _freeze(model: nn.Sequential) -> nn.Sequential:
    for one in (*model[0].parameters(), *model[1].parameters()):
        one.requires_grad_(False)
    return model


def _evaluated_norm() -> nn.Sequential:
    model = _convolutions()
    model[1].eval()
    with torch.no_grad():
        model[1].running_mean.normal_(), model[1].running_var.uniform_(0.5, 1.5)  # type: ignore[operator]
    return model


_MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch], Loss]] = {
    "frozen layers": (lambda: _freeze(_convolutions()), _images, F.cross_entropy),
    "tied weights": (_Tied, lambda: (torch.randint(0, 7, (4, 5)), torch.randint(0, 7, (4,))), F.cross_entropy),
    "unused parameters": (_Unused, _rows, F.mse_loss),
    "dropout": (lambda: _linear(nn.Dropout(0.5)), _rows, F.mse_loss),
    "evaluated norm": (_evaluated_norm, _images, F.cross_entropy),
    "checkpoints": (lambda: _Checkpointed(reentrant=False), _rows, F.mse_loss),
    "reentrant checkpoints": (lambda: _Checkpointed(reentrant=True), _rows, F.mse_loss),
    "blocks of other dtypes": (_Precisions, _rows, F.mse_loss),
    "weight norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3))), _rows, F.mse_loss,
    ),
    "group norm": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(128, 5)),
                   _images, F.cross_entropy),
    "spectral norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))), _rows, F.mse_loss,
    ),
    "recurrent": (lambda: _Recurrent(), lambda: (torch.randn(4, 3, 6), torch.randn(4, 3)), F.mse_loss),
    "lstm": (
        lambda: nn.LSTM(6, 8), lambda: (torch.randn(4, 3, 6), torch.randn(4, 3, 8)),
        lambda y, target: F.mse_loss(y[0], target),
    ),
    "reflected sequence": (
        lambda: nn.Sequential(nn.Conv1d(6, 4, 3), nn.ReflectionPad1d((2, 1)), nn.Flatten(), nn.Linear(28, 3)),
        lambda: (torch.randn(4, 6, 6), torch.randn(4, 3)), F.mse_loss,
    ),
    "attention": (lambda: _Attention(), lambda: (torch.randn(4, 3, 8), torch.randn(4, 3, 8)), F.mse_loss),
}  # fmt: skip


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], 8)
        for place in range(x.shape[1]):
            state = self.cell(x[:, place], state)
        return self.head(state)


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@pytest.mark.share(7)
@pytest.mark.parametrize("name", _MODELS)
def test_models(name: str) -> None:
    torch.manual_seed(0)
    make, batch, loss = _MODELS[name]
    follow(make(), [batch() for _ in range(3)], loss)


def _ctc(**given: Any) -> Loss:
    """The loss of 20 numbers as 2 sequences of 6 steps with 3 classes, after a product."""
    spread = torch.randn(20, 36, generator=torch.Generator().manual_seed(0))

    def loss(y: torch.Tensor, targets: torch.Tensor, steps: Any, lengths: Any) -> torch.Tensor:
        x = (y.flatten() @ spread).view(6, 2, 3).log_softmax(-1)
        return F.ctc_loss(x, targets, steps, lengths, **given)

    return loss


_UNREDUCED = _ctc(reduction="none")
_WEIGHT = torch.tensor([0.2, 1.0, 0.5, 2.0, 1.0])
_LOSSES: dict[str, tuple[Loss, Callable[[], Batch]]] = {
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), _images),
    "class weights": (nn.CrossEntropyLoss(weight=_WEIGHT), _images),
    "weights and smoothing": (nn.CrossEntropyLoss(weight=_WEIGHT, label_smoothing=0.2), _images),
    "ignored classes": (nn.CrossEntropyLoss(ignore_index=2), _images),
    "sum": (nn.CrossEntropyLoss(reduction="sum"), _images),
    "probabilities": (nn.CrossEntropyLoss(), lambda: (_images()[0], torch.rand(4, 5).softmax(1))),
    "nll": (lambda y, target: F.nll_loss(y.log_softmax(1), target), _images),
    "multi margin": (nn.MultiMarginLoss(), _images),
    **{
        type(loss).__name__: (loss, lambda: (_images()[0], torch.rand(4, 5)))
        for loss in (
            nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss(), nn.BCEWithLogitsLoss(),
            nn.BCEWithLogitsLoss(pos_weight=_WEIGHT), nn.PoissonNLLLoss(), nn.SoftMarginLoss(),
            nn.MultiLabelSoftMarginLoss(),
        )
    },
    "KLDivLoss": (
        lambda y, target: F.kl_div(y.log_softmax(1), target.softmax(1), reduction="batchmean"),
        lambda: (_images()[0], torch.rand(4, 5)),
    ),
    "cosine": (
        lambda y, other, sign: F.cosine_embedding_loss(y, other, sign),
        lambda: (_images()[0], torch.randn(4, 5), torch.randint(0, 2, (4,)) * 2.0 - 1),
    ),
    "triplet": (
        F.triplet_margin_loss, lambda: (_images()[0], torch.randn(4, 5), torch.randn(4, 5)),
    ),
    "ctc": (_ctc(), lambda: (_images()[0], torch.randint(1, 3, (2, 3)), torch.tensor([6, 5]), torch.tensor([2, 3]))),
    "ctc of joined targets": (
        _ctc(reduction="sum", blank=1, zero_infinity=True),
        lambda: (_images()[0], torch.tensor([0, 2, 0, 2, 0]), torch.tensor([6, 4]), torch.tensor([2, 3])),
    ),
    "ctc of fixed lengths": (
        lambda y, target: _UNREDUCED(y, target, (6, 5), [3, 1]).sum(),
        lambda: (_images()[0], torch.randint(1, 3, (2, 3))),
    ),
    "penalty on activations": (lambda y, target: F.cross_entropy(y, target) + 1e-2 * y.square().mean(), _images),
}  # fmt: skip


@pytest.mark.share(7)
@pytest.mark.parametrize("name", _LOSSES)
def test_losses(name: str) -> None:
    torch.manual_seed(0)
    loss, batch = _LOSSES[name]
    follow(_convolutions(), [batch() for _ in range(2)], loss)


class _Realness(nn.Module):
    """A loss with a discriminator, whose batch statistics change, and a trained temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.discriminator = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
        self.temperature = nn.Parameter(torch.ones(()))

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return F.softplus(-self.discriminator(y) * self.temperature).mean()


def test_a_loss_with_modules_of_its_own() -> None:
    torch.manual_seed(0)
    model, loss = _linear(), _Realness()
    expected, right = copy.deepcopy((model, loss))
    own, theirs = (
        torch.optim.SGD([*m.parameters(), one.temperature], 0.1)
        for m, one in ((model, loss), (expected, right))
    )
    step = escalade.training_step(model, loss, own, (torch.randn(4, 6),))
    torch.testing.assert_close(loss.state_dict(), right.state_dict(), rtol=0, atol=0)
    for _ in range(3):
        x = torch.randn(4, 6)
        with torch.no_grad():  # as by the discriminator's own step
            for one in (loss, right):
                next(one.discriminator.parameters()).mul_(0.5)
        theirs.zero_grad()
        value = right(expected(x))
        value.backward()
        theirs.step()
        torch.testing.assert_close(step(x), value.detach())
    torch.testing.assert_close(model.state_dict(), expected.state_dict())
    torch.testing.assert_close(loss.state_dict(), right.state_dict())


def _decay_groups(model: nn.Module) -> torch.optim.Optimizer:
    decayed = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() <= 1]
    return torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 0.02}], 0.01
    )


def test_groups_with_their_own_decay_and_rate() -> None:
    torch.manual_seed(0)
    follow(_convolutions(), [_images() for _ in range(3)], make=_decay_groups, loss_scale=None)


@pytest.mark.parametrize("device", ["cpu", "twin"])
def test_mixed_groups_are_scaled_together(device: str) -> None:
    """Gradients of two dtypes in two groups, in mixed precision with a loss scale."""
    torch.manual_seed(0)
    model = _convolutions()
    step = follow(
        model, [_images() for _ in range(2)], make=_decay_groups, dtype="bf16", loss_scale=64.0, device=device,
        close=3e-2,
    )  # fmt: skip
    assert step.skipped_steps == 0
    before = copy.deepcopy(model.state_dict())
    x, target = _images()
    step(torch.full_like(x, torch.inf), target)
    assert step.skipped_steps == 1
    for name, one in model.named_parameters():
        assert torch.equal(one, before[name]), name


def test_batches_of_other_sizes() -> None:
    """One image, and a smaller last batch."""
    torch.manual_seed(0)
    follow(_convolutions(), [_images(size) for size in (4, 4, 1, 3, 4)])


def test_rates_that_change_between_steps() -> None:
    def between(number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + number)

    torch.manual_seed(0)
    follow(_convolutions(), [_images() for _ in range(4)], between=between)


def _layers_thawed() -> Iterator[Callable[[int, nn.Module, torch.optim.Optimizer], None]]:
    def thaw(number: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if number == 2:
            first = next(model.children())
            for one in first.parameters():
                one.requires_grad_(True)
            optimizer.add_param_group({"params": list(first.parameters()), "lr": 0.01})

    yield thaw


def test_layers_that_are_thawed_later() -> None:
    torch.manual_seed(0)
    (thaw,) = _layers_thawed()
    follow(_freeze(_convolutions()), [_images() for _ in range(4)], between=thaw)


def test_a_run_resumed_from_a_checkpoint_on_disk(tmp_path: Any) -> None:
    torch.manual_seed(0)
    batches = [_images() for _ in range(4)]
    model = _convolutions()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    step = escalade.training_step(model, F.cross_entropy, optimizer, batches[0], loss_scale=128.0)
    for batch in batches[:2]:
        step(*batch)
    path = tmp_path / "run.pt"
    torch.save([model.state_dict(), optimizer.state_dict(), step.state_dict()], path)
    expected = [float(step(*batch)) for batch in batches[2:]]
    again = _convolutions()
    restored = torch.optim.AdamW(again.parameters(), 0.5)
    of_model, of_optimizer, of_step = torch.load(path)
    again.load_state_dict(of_model)
    restored.load_state_dict(of_optimizer)
    resumed = escalade.training_step(again, F.cross_entropy, restored, batches[0], loss_scale=1.0)
    resumed.load_state_dict(of_step)
    assert [float(resumed(*batch)) for batch in batches[2:]] == expected
    torch.testing.assert_close(again.state_dict(), model.state_dict(), rtol=0, atol=0)
