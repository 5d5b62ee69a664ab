"""Networks of two linear layers and a test's own function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from escalade.engine import Engine, compile


class Network(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 8), nn.Linear(8, 12)
        self.function = function

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.function(self, *inputs)


def made(function: Callable[..., Any], *examples: torch.Tensor, **options: Any) -> tuple[nn.Module, Engine]:
    torch.manual_seed(1)
    model = Network(function).eval()
    return model, compile(model, examples or (torch.randn(2, 12),), **{"device": "twin", **options})


ONE: Callable[..., Any] = lambda p, x: p.first(x)  # noqa: E731
TWO: Callable[..., Any] = lambda p, x: torch.softmax(p.first(x), -1)  # noqa: E731
