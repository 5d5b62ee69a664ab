"""A network of your own, compiled and explained.

    python examples/custom_network.py

Any `torch.nn.Module` that `torch.export` can capture will do. With a GPU the engine runs there; without one it runs
on the twin: the same CUDA kernels, compiled by g++, thread by thread.
"""

from __future__ import annotations

import pathlib
import tempfile

import torch
from torch import nn

import escalade


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm(self.first(x)))
        return torch.relu(x + self.second(y))


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        Block(32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    ).eval()


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "twin"
    model, x = network(), torch.randn(2, 16, 12, 12)

    engine = escalade.compile(model, x, dtype="fp16", device=device)
    y = engine(x.to(engine.device)).cpu()
    torch.testing.assert_close(y.float(), model(x), atol=1e-2, rtol=1e-2)
    print(engine.explain())  # BatchNorm, bias, shortcut and ReLU are fused into the convolutions

    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "network.escalade"
        engine.save(path)  # weights and graph as data, without the model's Python code
        loaded = escalade.load(path, device=device)
        torch.testing.assert_close(loaded(x.to(loaded.device)).cpu(), y)


if __name__ == "__main__":
    main()
