"""Statistics and counts of normalization layers between steps, on the CPU and on the twin."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import escalade
from tests.engine.training.running_statistics import check_statistics


@pytest.mark.parametrize(("device", "counted"), [("cpu", 41), ("twin", 0)])
def test_statistics_are_pytorchs(device: str, counted: int, seed: int) -> None:
    check_statistics(device, counted, seed)


def test_the_callers_layer_stays_as_it_is() -> None:
    """Tracing replaces `forward` in its own copy; a layer frozen in evaluation mode counts nothing."""
    norm = nn.BatchNorm2d(4, momentum=None).eval()
    model = nn.Sequential(nn.Conv2d(3, 4, 1), norm)
    x = torch.randn(2, 3, 4, 5)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = escalade.training_step(model, lambda y: y.square().mean(), optimizer, (x,))
    step(x)
    assert "forward" not in vars(norm) and norm.momentum is None
    assert norm.num_batches_tracked is not None and int(norm.num_batches_tracked) == 0
    assert norm.running_mean is not None and not norm.running_mean.any()
