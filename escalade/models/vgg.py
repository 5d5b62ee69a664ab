"""VGG with BatchNorm and torchvision's parameter names."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

VGG16 = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class VGG(nn.Module):
    """Stages of 3x3 convolutions, each followed by a max pool, then three linear layers."""

    def __init__(
        self,
        stages: Sequence[Sequence[int]] = VGG16,
        classes: int = 1000,
        channels: int = 3,
        hidden: int = 4096,
        pooled: int = 7,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for stage in stages:
            for width in stage:
                layers += [
                    nn.Conv2d(channels, width, 3, padding=1),
                    nn.BatchNorm2d(width),
                    nn.ReLU(inplace=True),
                ]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(pooled)
        self.classifier = nn.Sequential(
            nn.Linear(channels * pooled * pooled, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(self.avgpool(self.features(x)).flatten(1))


def vgg16_bn(classes: int = 1000) -> VGG:
    return VGG(VGG16, classes)
