"""DenseNet for images, with torchvision's parameter names."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import nn


class DenseLayer(nn.Module):
    """Pre-activated 1x1 and 3x3 convolution; appends `growth` channels to its input."""

    def __init__(self, channels: int, growth: int, bottleneck: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, bottleneck * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(bottleneck * growth)
        self.conv2 = nn.Conv2d(bottleneck * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        new = self.conv2(torch.relu(self.norm2(self.conv1(torch.relu(self.norm1(x))))))
        return torch.cat([x, new], 1)


class Transition(nn.Module):
    """Halves the channels and the size."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.conv = nn.Conv2d(channels, channels // 2, 1, bias=False)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(self.conv(torch.relu(self.norm(x))))


class DenseNet(nn.Module):
    """Stem, dense blocks separated by transitions, global average pool, classifier."""

    def __init__(
        self,
        depths: Sequence[int],
        growth: int = 32,
        first: int = 64,
        bottleneck: int = 4,
        classes: int = 1000,
        channels: int = 3,
    ) -> None:
        super().__init__()
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            conv0=nn.Conv2d(channels, first, 7, 2, 3, bias=False),
            norm0=nn.BatchNorm2d(first),
            relu0=nn.ReLU(inplace=True),
            pool0=nn.MaxPool2d(3, 2, 1),
        )
        width = first
        for number, depth in enumerate(depths, 1):
            block: OrderedDict[str, nn.Module] = OrderedDict()
            for position in range(1, depth + 1):
                block[f"denselayer{position}"] = DenseLayer(width, growth, bottleneck)
                width += growth
            layers[f"denseblock{number}"] = nn.Sequential(block)
            if number < len(depths):
                layers[f"transition{number}"] = Transition(width)
                width //= 2
        layers["norm5"] = nn.BatchNorm2d(width)
        self.features = nn.Sequential(layers)
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.features(x))
        return self.classifier(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))


def densenet121(classes: int = 1000) -> DenseNet:
    return DenseNet((6, 12, 24, 16), classes=classes)
