"""Means moved in front of 1×1 convolutions, and those that do not average the same pixels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from escalade.engine.capture.export import capture
from escalade.engine.passes import for_batch, optimize
from escalade.ops.base.card import H200


class Model(nn.Module):
    def __init__(self, behind: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.wide, self.map = nn.Conv2d(64, 128, 3, padding=1), nn.Conv2d(128, 64, 1)
        self.behind = behind

    def forward(self, x: torch.Tensor) -> object:
        return self.behind(self.map(self.wide(x)))


@pytest.mark.parametrize(
    ("behind", "is_first"),
    [
        (lambda y: F.avg_pool2d(y, 2), True),
        (lambda y: F.avg_pool2d(y, 3, 2, 1, count_include_pad=False), True),
        (lambda y: F.avg_pool2d(y, 3, 2, 1), False),  # padding pixels lack the bias
        (lambda y: F.avg_pool2d(y, 2, divisor_override=3), False),
        (lambda y: (F.avg_pool2d(y, 2), y.amax((2, 3))), False),
    ],
    ids=["plain", "of pixels", "of padding", "divided otherwise", "read twice"],
)
def test_a_mean_of_pixels_is_taken_first(behind: Callable[[torch.Tensor], object], is_first: bool) -> None:
    graph = capture(Model(behind).eval(), (torch.randn(2, 64, 56, 56),))
    found = [node.op for node in for_batch(optimize(graph, "fp16"), "fp16", 8, card=H200)]
    assert found[1:4] == ["conv2d", *(["avg_pool2d", "conv2d"] if is_first else ["conv2d", "avg_pool2d"])]
