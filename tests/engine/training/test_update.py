"""Common changes between backward pass and optimizer, and around them, compared with PyTorch's own loop."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler, swa_utils

import escalade
from escalade.engine.plan import kernels
from escalade.engine.training import planned
from escalade.errors import UnsupportedError

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


@pytest.fixture(autouse=True)
def runs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "CHECKS_PLANS", False)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9)


def _batches(sizes: Iterable[int], spread: float = 1.0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(spread * torch.randn(size, 6), torch.randint(0, 3, (size,))) for size in sizes]


def _same(mine: Any, theirs: Any, close: float = 1e-5) -> None:
    torch.testing.assert_close(mine, theirs, rtol=close, atol=close)


class Loop:
    """PyTorch's own loop, with clipping and accumulation."""

    def __init__(
        self, make: Make, clip_norm: float | None, clip_value: float | None, accumulate: int
    ) -> None:
        self.model = _model()
        self.optimizer = make(self.model.parameters())
        self._clip_norm, self._clip_value, self._accumulate = clip_norm, clip_value, accumulate
        self._calls = 0
        self.norm: torch.Tensor | None = None

    def step(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.model(x), target)
        (loss / self._accumulate).backward()
        self._calls += 1
        if self._calls % self._accumulate == 0:
            if self._clip_norm is not None:
                self.norm = nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
            if self._clip_value is not None:
                nn.utils.clip_grad_value_(self.model.parameters(), self._clip_value)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss.detach()


class Pair:
    """A training step, and PyTorch's loop to compare it with."""

    def __init__(
        self,
        make: Make = _sgd,
        *,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        accumulate: int = 1,
        close: float = 1e-5,
        **given: Any,
    ) -> None:
        self._close, self._clips = close, clip_norm is not None
        self.loop, self.model = Loop(make, clip_norm, clip_value, accumulate), _model()
        self.own = make(self.model.parameters())
        self.step = escalade.training_step(
            self.model, F.cross_entropy, self.own, _batches((4,))[0],
            clip_norm=clip_norm, clip_value=clip_value, accumulate=accumulate, **given,
        )  # fmt: skip
        self.optimizers = (self.own, self.loop.optimizer)

    def follow(self, sizes: Iterable[int] = (4, 4, 4, 4), schedules: Iterable[Any] = ()) -> None:
        """Take the same steps."""
        for batch in _batches(sizes):
            found, expected = self.step(*batch), self.loop.step(*batch)
            _same(found, expected, self._close)
            if self.loop.norm is not None:
                _same(self.step.gradient_norm, self.loop.norm, self._close)
            for one in schedules:
                one.step(*([float(expected)] if isinstance(one, lr_scheduler.ReduceLROnPlateau) else []))
        _same(self.model.state_dict(), self.loop.model.state_dict(), self._close)
        own, theirs = (one.state_dict()["state"] for one in self.optimizers)
        _same(own, theirs, self._close)

    def begin_again(self, settings: dict[str, Any]) -> None:
        """Give both optimizers other settings, and clear their state."""
        for optimizer in self.optimizers:
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group.pop("initial_lr", None)
                group.update(copy.deepcopy(settings))


def test_gradients_are_clipped_as_pytorch_clips_them() -> None:
    """Limits that are exceeded and some that are not, with and without a loss scale."""
    limits: tuple[dict[str, Any], ...] = (
        {"clip_norm": 0.05}, {"clip_norm": 1e3}, {"clip_value": 0.01}, {"clip_norm": 0.5, "clip_value": 0.02},
    )  # fmt: skip
    for given, scale in zip(limits, (None, 1024.0, None, 1024.0), strict=True):
        Pair(**given, loss_scale=scale).follow((4, 4))


def test_updates_by_the_mean_of_several_calls() -> None:
    """Batches of several sizes, whose plans share the sum; BatchNorm's statistics change at each call."""
    Pair(accumulate=3).follow((4, 2, 4, 4, 4, 2, 4, 4))
    Pair(accumulate=2, clip_norm=0.05, loss_scale=1024.0).follow((4, 2, 4, 4))
    Pair(accumulate=4).follow((4, 4, 4))  # no update


@pytest.mark.parametrize("device", ["cpu", "twin"])
def test_kernels_and_operators_clip_and_accumulate(device: str) -> None:
    Pair(torch.optim.AdamW, accumulate=2, clip_norm=0.05, clip_value=0.02, device=device, close=1e-4).follow()


def test_gradients_are_exchanged_once_per_update() -> None:
    exchanged: list[int] = []
    Pair(accumulate=2, clip_norm=0.05, reduce=lambda gradients: exchanged.append(gradients.numel())).follow()
    assert len(exchanged) == 2


def test_skipped_steps_are_counted() -> None:
    """Non-finite gradients skip the update in whichever call they occur, and never clip the others."""
    for accumulate in (1, 2):
        model = _model()
        optimizer = _sgd(model.parameters())
        x, target = _batches((4,))[0]
        step = escalade.training_step(
            model, F.cross_entropy, optimizer, (x, target),
            loss_scale=8.0, clip_norm=0.1, accumulate=accumulate,
        )  # fmt: skip
        assert step.skipped_steps == 0
        before = copy.deepcopy([one.detach() for one in model.parameters()])
        for place in range(accumulate):
            step(torch.full_like(x, torch.inf) if place == 0 else x, target)
        assert step.skipped_steps == 1 and step.loss_scale == 4.0
        _same([one.detach() for one in model.parameters()], before, 0)
        for buffer in model.buffers():
            buffer.zero_() if buffer.dtype == torch.int64 else buffer.fill_(1.0)
        for _ in range(accumulate):
            step(x, target)
        assert (
            step.skipped_steps == 1
            and torch.stack([one.sum() for one in model.parameters()]).isfinite().all()
        )


def test_every_setting_of_the_optimizers() -> None:
    flags: dict[Callable[..., torch.optim.Optimizer], dict[str, tuple[Any, ...]]] = {
        torch.optim.SGD: {
            "momentum": (0.0, 0.9), "nesterov": (False, True), "weight_decay": (0.0, 0.1), "maximize": (False, True),
            "dampening": (0.0, 0.3),
        },
        torch.optim.Adam: {
            "amsgrad": (False, True), "weight_decay": (0.0, 0.1), "maximize": (False, True),
            "decoupled_weight_decay": (False, True), "eps": (1e-3,),
        },
        torch.optim.AdamW: {
            "amsgrad": (False, True), "weight_decay": (0.0, 0.1), "maximize": (False, True), "betas": ((0.5, 0.9),),
            "lr": (torch.tensor(1e-2),),
        },
        torch.optim.RMSprop: {
            "momentum": (0.0, 0.9), "centered": (False, True), "weight_decay": (0.0, 0.1), "maximize": (False, True),
            "alpha": (0.9,), "eps": (0.1,),
        },
    }  # fmt: skip
    for kind, options in flags.items():
        pair = Pair(partial(kind, lr=1e-2))
        for chosen in product(*options.values()):
            settings = {"lr": 1e-2, **dict(zip(options, chosen, strict=True))}
            if settings.get("nesterov") and (not settings["momentum"] or settings["dampening"]):
                continue
            pair.begin_again(settings)
            pair.follow((4, 4))


class _Signs(torch.optim.Optimizer):
    """An optimizer of the caller's own, which spoils the gradients that it is given and keeps them."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.01})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                kept = self.state[one].get("gradient")
                one.data.sub_((one.grad if kept is None else one.grad + 0.5 * kept).sign(), alpha=group["lr"])
                self.state[one]["gradient"] = one.grad.mul_(2)


class _OtherSgd(torch.optim.SGD):
    """A class of its own may do anything."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["lr"] *= 0.5
        super().step()


def halved(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer that halves its gradients before each step."""
    optimizer = _sgd(parameters)

    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for one in group["params"]:
                one.grad.mul_(0.5)

    optimizer.register_step_pre_hook(halve)
    return optimizer


_OWN_STEPS: dict[str, Make] = {
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": partial(torch.optim.NAdam, lr=0.1),
    "RAdam": partial(torch.optim.RAdam, lr=0.1),
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
    "signs": _Signs,
    "subclass": partial(_OtherSgd, lr=0.1, momentum=0.9),
    "hooks": halved,
}


@pytest.mark.parametrize("make", _OWN_STEPS.values(), ids=_OWN_STEPS)
def test_other_optimizers_step_themselves(make: Make) -> None:
    Pair(make).follow()
    Pair(make, clip_norm=0.05, clip_value=0.02, accumulate=2, loss_scale=1024.0).follow((4, 2, 4, 4))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_other_optimizers_on_kernels(accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In mixed precision, whose gradients have 16 bits; as on a GPU, the graph ends before the optimizer's step."""
    graphs: list[Any] = []

    class Graph:
        def __init__(self, record: Callable[[], Any], stream: Any) -> None:
            graphs.append(self)
            self.replay = record

    pair = Pair(
        _OWN_STEPS["Adagrad"], device="twin", dtype="bf16", accumulate=accumulate, clip_norm=0.05, close=0.03,
        reduce=lambda gradients: gradients.mul_(1),
    )  # fmt: skip
    monkeypatch.setattr(kernels, "CapturedGraph", Graph)
    monkeypatch.setattr(pair.step.program, "_capture_stream", "a stream", raising=False)
    pair.follow()
    assert len(graphs) == 1


def test_other_optimizers_leave_gradients_alone() -> None:
    """Those of the caller stay, also if the step fails, and a skipped step calls nothing."""
    model, calls = _model(), []
    optimizer = torch.optim.Adagrad([*model.parameters(), unused := nn.Parameter(torch.ones(2))])
    optimizer.register_step_pre_hook(lambda *_: calls.append([one.grad is None for one in (unused,)]))
    x, target = _batches((4,))[0]
    step = escalade.training_step(model, F.cross_entropy, optimizer, (x, target), loss_scale=8.0)
    mine = [torch.full_like(one, 7.0) for one in (*model.parameters(), unused)]
    for one, gradient in zip((*model.parameters(), unused), mine, strict=True):
        one.grad = gradient
    step(x, target)
    step(torch.full_like(x, torch.inf), target)
    assert calls == [[True]] and step.skipped_steps == 1 and step.loss_scale == 4.0

    def fail(*_: Any) -> None:
        raise ArithmeticError

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(ArithmeticError):
        step(x, target)
    handle.remove()
    step(x, target)
    for one, gradient in zip((*model.parameters(), unused), mine, strict=True):
        assert one.grad is gradient and bool((gradient == 7).all())


def test_hooks_that_come_and_go() -> None:
    """A rule is left for the optimizer's own step and taken up again, with the same state."""
    pair = Pair(partial(torch.optim.Adam, lr=0.1))
    for _ in range(3):
        handles = [
            one.register_step_post_hook(lambda optimizer, *_: optimizer.param_groups[0].update(lr=0.05))
            for one in pair.optimizers
        ]
        pair.follow((4,))
        for handle in handles:
            handle.remove()
        pair.follow((4, 2))
        assert "optimizer state" in str(pair.step.explain().notes)


def test_every_scheduler_of_learning_rates() -> None:
    """They set the optimizer's learning rate, and some its momentum; the next call reads both."""
    schedules: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
        "LambdaLR": lambda one: lr_scheduler.LambdaLR(one, lambda epoch: 0.9**epoch),
        "MultiplicativeLR": lambda one: lr_scheduler.MultiplicativeLR(one, lambda epoch: 0.9),
        "StepLR": lambda one: lr_scheduler.StepLR(one, 1),
        "MultiStepLR": lambda one: lr_scheduler.MultiStepLR(one, [1, 2]),
        "ConstantLR": lambda one: lr_scheduler.ConstantLR(one, total_iters=2),
        "LinearLR": lr_scheduler.LinearLR,
        "ExponentialLR": lambda one: lr_scheduler.ExponentialLR(one, 0.5),
        "PolynomialLR": lambda one: lr_scheduler.PolynomialLR(one, 3),
        "CosineAnnealingLR": lambda one: lr_scheduler.CosineAnnealingLR(one, 3),
        "CosineAnnealingWarmRestarts": lambda one: lr_scheduler.CosineAnnealingWarmRestarts(one, 2),
        "CyclicLR": lambda one: lr_scheduler.CyclicLR(one, 0.01, 0.1, 2),
        "OneCycleLR": lambda one: lr_scheduler.OneCycleLR(one, 0.1, total_steps=5),
        "ReduceLROnPlateau": lambda one: lr_scheduler.ReduceLROnPlateau(one, patience=0, factor=0.5),
        "ChainedScheduler": lambda one: lr_scheduler.ChainedScheduler(
            [lr_scheduler.StepLR(one, 1), lr_scheduler.ExponentialLR(one, 0.5)]
        ),
        "SequentialLR": lambda one: lr_scheduler.SequentialLR(
            one, [lr_scheduler.ConstantLR(one), lr_scheduler.StepLR(one, 1)], [2]
        ),
        "SWALR": lambda one: swa_utils.SWALR(one, 0.01, anneal_epochs=2),
    }
    public = {name for name in lr_scheduler.__all__ if name not in ("LRScheduler",)}
    assert public <= schedules.keys(), "a scheduler of this PyTorch is not tried"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of schedulers without a step of their optimizer
        warnings.filterwarnings("ignore", message=".*epoch parameter.*")  # by SequentialLR itself
        pair = Pair()
        for schedule in schedules.values():
            pair.begin_again({"lr": 0.1, "momentum": 0.9})
            pair.follow(schedules=[schedule(one) for one in pair.optimizers])


def test_averages_of_weights_follow() -> None:
    """An exponential moving average of PyTorch's reads the model's own tensors between steps."""
    model, loop = _model(), Loop(_sgd, None, None, 1)
    optimizer = _sgd(model.parameters())
    function = swa_utils.get_ema_multi_avg_fn(0.9)
    mine, theirs = (
        swa_utils.AveragedModel(one, multi_avg_fn=function, use_buffers=True) for one in (model, loop.model)
    )
    batches = _batches((4, 4, 4))
    step = escalade.training_step(model, F.cross_entropy, optimizer, batches[0])
    for batch in batches:
        step(*batch)
        loop.step(*batch)
        mine.update_parameters(model)
        theirs.update_parameters(loop.model)
    _same(mine.state_dict(), theirs.state_dict())


def test_settings_that_no_step_takes() -> None:
    model = _model()
    optimizer, batch = _sgd(model.parameters()), _batches((4,))[0]
    for given in (
        {"clip_norm": 0.0}, {"clip_norm": float("nan")}, {"clip_value": -1.0}, {"clip_value": "much"},
        {"accumulate": 0}, {"accumulate": 1.5}, {"accumulate": True},
    ):  # fmt: skip
        (name,) = given
        with pytest.raises(UnsupportedError, match=f"{name} .*: pass"):
            escalade.training_step(model, F.cross_entropy, optimizer, batch, **given)


class _TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.norm(torch.tanh(self.body(x)))
        return {"classes": self.first(y), "rest": (self.second(y), y)}


def _two_losses(
    found: dict[str, Any], target: torch.Tensor, level: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    by_class, by_level = F.cross_entropy(found["classes"], target), F.mse_loss(found["rest"][0], level)
    right = (found["classes"].argmax(1) == target).sum()
    return by_class + 0.5 * by_level, by_class, by_level, right, level


@pytest.mark.parametrize("checks_plans", [True, False])
def test_several_outputs_and_losses(checks_plans: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of a loss are returned with their values before the update, even if they are views of parameters."""
    monkeypatch.setattr(planned, "CHECKS_PLANS", checks_plans)
    torch.manual_seed(0)
    model = _TwoHeads()
    expected = copy.deepcopy(model)
    own, theirs = _sgd(model.parameters()), _sgd(expected.parameters())
    x, target, level = torch.randn(5, 6), torch.randint(0, 3, (5,)), torch.randn(5, 1)
    step = escalade.training_step(model, _two_losses, own, (x, target, level), loss_scale=64.0, accumulate=1)
    for _ in range(3):
        loss, *parts = _two_losses(expected(x), target, level)
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        _same(step(x, target, level), loss.detach())
        _same(step.loss_parts, tuple(one.detach() for one in parts))
    _same(model.state_dict(), expected.state_dict())
