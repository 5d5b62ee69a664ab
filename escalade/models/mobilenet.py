"""MobileNetV2 for images, with torchvision's parameter names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

Stage = tuple[int, int, int, int]
"""Expansion, channels, number of blocks, and stride of the first block."""
STAGES: tuple[Stage, ...] = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def _conv_bn_relu6(channels: int, filters: int, size: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, filters, size, stride, size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(filters),
        nn.ReLU6(inplace=True),
    )


class InvertedResidual(nn.Module):
    """1x1 expansion, depthwise 3x3, 1x1 projection, with a residual connection if the shapes match."""

    def __init__(self, channels: int, filters: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels * expansion
        layers = [_conv_bn_relu6(channels, hidden, 1)] if expansion != 1 else []
        self.conv = nn.Sequential(
            *layers,
            _conv_bn_relu6(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, filters, 1, bias=False),
            nn.BatchNorm2d(filters),
        )
        self.has_residual = stride == 1 and channels == filters

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.conv(x) if self.has_residual else self.conv(x)


class MobileNetV2(nn.Module):
    """Strided convolution, stages of inverted residuals, global average pool, classifier."""

    def __init__(
        self,
        stages: Sequence[Stage] = STAGES,
        classes: int = 1000,
        channels: int = 3,
        width: float = 1.0,
        first: int = 32,
        last: int = 1280,
    ) -> None:
        super().__init__()
        before = _scaled(first, width)
        last = _scaled(last, max(1.0, width))
        layers: list[nn.Module] = [_conv_bn_relu6(channels, before, 3, 2)]
        for expansion, filters, depth, stride in stages:
            after = _scaled(filters, width)
            for position in range(depth):
                layers.append(InvertedResidual(before, after, stride if position == 0 else 1, expansion))
                before = after
        layers.append(_conv_bn_relu6(before, last, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(last, classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.features(x).mean((2, 3)))


def _scaled(channels: int, width: float) -> int:
    """Return channels * width rounded to a multiple of 8, at most 10% below the product (as torchvision does)."""
    product = channels * width
    rounded = max(8, int(product + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * product else rounded


def mobilenet_v2(classes: int = 1000, width: float = 1.0) -> MobileNetV2:
    return MobileNetV2(classes=classes, width=width)
