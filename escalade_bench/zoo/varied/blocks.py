"""Building blocks shared by these networks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Layer = Callable[[int], nn.Module]
"""Creates a layer for a number of channels: a norm, or a block that keeps image sizes."""


def conv(
    channels: int,
    filters: int,
    size: int = 3,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
    norm: Layer = nn.BatchNorm2d,
    activation: Callable[[], nn.Module] = nn.ReLU,
) -> nn.Sequential:
    """A convolution with same padding, a norm and an activation."""
    padding = dilation * ((size - 1) // 2)
    layer = nn.Conv2d(channels, filters, size, stride, padding, dilation, groups, bias=False)
    return nn.Sequential(layer, norm(filters), activation())


class Around(nn.Module):
    """Residual block: layers and a shortcut, summed, with an optional activation."""

    def __init__(
        self, *layers: nn.Module, shortcut: nn.Module | None = None, activation: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)
        self.shortcut = shortcut or nn.Identity()
        self.activation = activation or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.activation(self.shortcut(x) + self.layers(x))


def basic_block(channels: int, filters: int, stride: int = 1, attention: Layer | None = None) -> Around:
    """ResNet's block of two 3x3 convolutions, with optional attention before the sum."""
    shortcut = None
    if stride != 1 or channels != filters:
        shortcut = conv(channels, filters, 1, stride, activation=nn.Identity)
    return Around(
        conv(channels, filters, 3, stride),
        conv(filters, filters, activation=nn.Identity),
        *([attention(filters)] if attention else []),
        shortcut=shortcut,
        activation=nn.ReLU(),
    )


def stages(width: int, depth: int, attention: Layer | None = None) -> list[nn.Sequential]:
    """ResNet's four stages of basic blocks: each but the first halves the image and doubles the width."""
    made, channels = [], width
    for number in range(4):
        filters = width << number
        first = basic_block(channels, filters, 2 if number else 1, attention)
        made.append(
            nn.Sequential(
                first, *(basic_block(filters, filters, attention=attention) for _ in range(depth - 1))
            )
        )
        channels = filters
    return made


def stem(width: int) -> nn.Sequential:
    """ResNet's first convolution and its pool, which reduce height and width to a quarter."""
    return nn.Sequential(conv(3, width, 7, 2), nn.MaxPool2d(3, 2, 1))


def classifier(channels: int, classes: int) -> nn.Sequential:
    """Global average pool and a linear layer."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))
