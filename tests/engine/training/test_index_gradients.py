"""Gradients of slices, padding, selected extremes and norms: of what only moves elements, or picks some of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import escalade
from escalade.engine.nodes.movement import as_slices, uncovered
from escalade.engine.training.step import plan_training_step
from escalade.ops.base.card import H200

Function = Callable[[torch.Tensor], torch.Tensor]


class Between(nn.Module):
    """A function between two convolutions."""

    def __init__(self, function: Function, channels: int) -> None:
        super().__init__()
        self.before, self.after = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(channels, 4, 1)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.function(self.before(x)))


def corners(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1)


def patches(x: torch.Tensor) -> torch.Tensor:
    x = x.permute(0, 2, 3, 1)
    return torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2]], -1).permute(0, 3, 1, 2)


def written(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, :2, 1::3] = x[:, 2:4, 1::3] * x[:, :2, ::3]
    y[:, 5] = 0
    y[..., -1] += 1
    return y


def differences(x: torch.Tensor) -> torch.Tensor:
    return F.pad(x[..., 1:] - x[..., :-1], (0, 1)) + x[:, :1, 2:3, -1:]


def added_twice(x: torch.Tensor) -> torch.Tensor:
    first = x[:, :, ::2]
    return first + first * 2 + x[:, :, 1::2]


FUNCTIONS: dict[str, tuple[Function, int]] = {
    "ranges of rows and columns": (lambda x: x[:, :, 2:-1, 1:], 8),
    "channels": (lambda x: x[:, 1:4], 3),
    "images": (lambda x: x[1:], 8),
    "every third": (lambda x: x[:, ::3, 1::3, ::2], 3),
    "all corners": (corners, 32),
    "three corners of rows": (patches, 24),
    "overlapping": (differences, 8),
    "added twice": (added_twice, 8),
    "written": (written, 8),
    "reflected": (lambda x: F.pad(x, (3, 1, 2, 4), "reflect"), 8),
    "replicated": (lambda x: F.pad(x, (3, 0, 9, 4), "replicate"), 8),
    "circular": (lambda x: F.pad(x, (3, 1, 5, 6), "circular"), 8),
    "largest channel": (lambda x: x * x.max(1, keepdim=True)[0] + x.min(3)[0][..., None], 8),
    "of all": (lambda x: x * (x.max() - x.min()), 8),
    "neighbors": (lambda x: F.local_response_norm(x, 3, alpha=0.5), 8),
    "repeated": (lambda x: x.repeat_interleave(2, 2).repeat_interleave(2, 3), 8),
    "no weights": (nn.BatchNorm2d(8, affine=False), 8),
    "no running statistics": (nn.BatchNorm2d(8, track_running_stats=False), 8),
}
_LEFT = frozenset(("max", "min", "_to_copy"))
"""Operators that PyTorch computes: an extreme with its index, which then becomes fp32."""


def _losses(model: nn.Module, device: str | None, x: torch.Tensor, dtype: str = "fp32") -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    target = torch.zeros_like(model(x))
    if device == "eager":
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses
    step = escalade.training_step(model, F.mse_loss, optimizer, (x, target), dtype=dtype, device=device)
    return [float(step(x, target)) for _ in range(2)]


def _models(name: str) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    function, channels = FUNCTIONS[name]
    model = Between(copy.deepcopy(function), channels).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_pytorchs(name: str) -> None:
    model, expected = _models(name)
    x = torch.randn(3, 3, 6, 10)
    copied = copy.deepcopy(model)
    torch.testing.assert_close(_losses(model, None, x), _losses(expected, "eager", x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-3, atol=1e-5)
    optimizer = torch.optim.SGD(copied.parameters(), 0.1)
    loss = lambda y: y.float().square().mean()  # noqa: E731
    plan = plan_training_step(copied, loss, optimizer, (x,), "fp16", H200)
    left = [step.node.calls or step.node.op for step in plan.fallbacks]
    no_work = (
        "select",
        "slice",
        "expand",
        "new_empty",
        "new_zeros",
    )  # views, and zeros between joined gradients
    allowed = {"largest channel": _LEFT, "neighbors": {"constant_pad_nd"}}.get(name, set())  # of volumes
    assert {*left} - {*no_work} <= allowed, left


@pytest.mark.share(7)
@pytest.mark.parametrize(
    "name", ["all corners", "three corners of rows", "written", "reflected", "neighbors"]
)
def test_kernels_compute_them(name: str) -> None:
    model, expected = _models(name)
    x = torch.randn(2, 3, 6, 10)
    torch.testing.assert_close(_losses(model, "twin", x), _losses(expected, "eager", x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-3, atol=1e-5)


def test_one_copy_joins_gradients_of_slices() -> None:
    """Four strided slices cover an image: no zeros are written, and nothing is added."""
    model, _ = _models("all corners")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = lambda y: y.float().square().mean()  # noqa: E731
    plan = plan_training_step(model, loss, optimizer, (torch.randn(2, 3, 6, 10),), "fp16", H200)
    (scatter,) = (step for step in plan.steps if step.node.op == "slice_scatter")
    assert scatter.choice is not None and len(scatter.choice.problem.parts) == 4
    assert not any(step.node.op == "add" for step in plan.steps)


@pytest.mark.parametrize(
    ("filters", "size", "padding", "device"),
    [(3, 7, (0, 0), "cpu"), (1, (8, 7), (4, 2), "cpu"), (6, 3, 1, "twin")],
)
def test_few_filters_change_roles_with_channels(filters: int, size: Any, padding: Any, device: str) -> None:
    """A layer of few filters has the weight gradient of one of few channels, with flipped filters."""

    def layers() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, filters, size, padding=padding))

    model, expected, x = layers(), layers(), torch.randn(2, 4, 12, 11)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loss = lambda y: y.float().square().mean()  # noqa: E731
    plan = plan_training_step(model, loss, optimizer, (x,), "fp16", H200)
    problems: list[Any] = [step.lowered.problem for step in plan.steps if step.lowered is not None]
    forward = [one.forward for one in problems if one.name.startswith(f"{filters}to8_")]
    assert [(one.channels, one.filters) for one in forward] == [(filters, 8)]
    assert not [step for step in plan.fallbacks if step.node.calls == "flip"]
    torch.testing.assert_close(_losses(model, device, x), _losses(expected, "eager", x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("boxes", [
    [],
    [(range(2, 5), range(0, 7))],
    [(range(1, 6, 2), range(0, 7, 3)), (range(0, 6, 2), range(1, 7, 2))],
    [(range(0, 6, 4), range(5, 6)), (range(1, 2), range(0, 7)), (range(3, 6), range(6, 7))],
])  # fmt: skip
def test_the_rest_of_boxes_covers_each_element_once(boxes: list[tuple[range, ...]]) -> None:
    counts = torch.zeros(6, 7)
    for box in [*boxes, *uncovered(boxes, (6, 7))]:
        counts[as_slices(box)] += 1
    assert torch.equal(counts, torch.ones(6, 7))
