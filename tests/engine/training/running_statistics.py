"""Normalization layers with running statistics, trained beside PyTorch, for tests on the twin and on a GPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import escalade

NORMS: dict[str, Callable[[], nn.Module]] = {
    "cumulative": lambda: nn.BatchNorm2d(4, momentum=None),
    "cumulative, not affine": lambda: nn.BatchNorm2d(4, momentum=None, affine=False),
    "momentum 0": lambda: nn.BatchNorm2d(4, momentum=0.0),
    "momentum 1": lambda: nn.BatchNorm2d(4, momentum=1.0),
    "not tracked": lambda: nn.BatchNorm2d(4, track_running_stats=False),
    "not tracked, cumulative": lambda: nn.BatchNorm2d(4, track_running_stats=False, momentum=None),
    "instances": lambda: nn.InstanceNorm2d(4, track_running_stats=True),
    "instances without momentum": lambda: nn.InstanceNorm2d(4, track_running_stats=True, momentum=None),  # type: ignore[arg-type]
    "rows": lambda: nn.Sequential(nn.Flatten(2), nn.BatchNorm1d(4, momentum=None), nn.Unflatten(2, (3, 5))),
}


def check_statistics(device: str, counted: int, seed: int, dtype: str = "fp32") -> None:
    """Check four steps of all `NORMS`, the last two from a checkpoint after `counted` batches."""
    torch.manual_seed(seed)
    place = "cpu" if device == "twin" else device
    model = _Norms().to(place)
    for name, buffer in model.named_buffers():
        if name.endswith("num_batches_tracked"):
            buffer.fill_(counted)
        else:
            buffer.uniform_(0.5, 2.0)
    theirs = copy.deepcopy(model)
    batches = [(torch.randn(2, 3, 3, 5, device=place) + n, _target(place)) for n in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    step = escalade.training_step(model, _loss, optimizer, batches[0], device=device, dtype=dtype)
    other = torch.optim.SGD(theirs.parameters(), 0.05)
    for number, (x, target) in enumerate(batches):
        if number == 2:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model = _Norms().to(place)
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            step = escalade.training_step(model, _loss, optimizer, batches[0], device=device, dtype=dtype)
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        before = copy.deepcopy(theirs.state_dict())
        other.zero_grad()
        with torch.autocast(place, torch.bfloat16, enabled=dtype == "bf16"):
            loss = _loss(theirs(x), target)
        loss.backward()
        other.step()
        close = 1e-5 if dtype == "fp32" else 2e-2
        torch.testing.assert_close(step(x, target), loss.detach(), rtol=close, atol=close)
        found, expected = model.state_dict(), theirs.state_dict()
        for name, value in expected.items():
            note = partial("{}: {}".format, name)
            torch.testing.assert_close(found[name], value, rtol=close, atol=close, msg=note)
        counts = [name for name in expected if name.endswith("num_batches_tracked")]
        assert any(found[name] == before[name] + 1 for name in counts)


class _Norms(nn.Module):
    """A branch per layer: its state does not depend on the other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.norms = nn.ModuleDict({name: make() for name, make in NORMS.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        return torch.stack([norm(y) for norm in self.norms.values()])


def _target(place: str) -> torch.Tensor:
    return torch.randn(len(NORMS), 2, 4, 3, 5, device=place)


def _loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(y.float(), target)
