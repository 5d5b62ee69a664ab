"""Classes of short films: convolutions over time too."""

from __future__ import annotations

import torch
from torch import nn

from escalade_bench.zoo.varied.blocks import takes


def _conv(
    channels: int, filters: int, size: tuple[int, int, int], stride: tuple[int, int, int] = (1, 1, 1)
) -> nn.Sequential:
    before, rows, columns = size
    padding = (before // 2, rows // 2, columns // 2)
    return nn.Sequential(
        nn.Conv3d(channels, filters, size, stride, padding, bias=False), nn.BatchNorm3d(filters)
    )


class FilmBlock(nn.Module):
    """Two convolutions of 3x3 pixels over three images, and the way around them."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        cube, step = (3, 3, 3), (stride, stride, stride)
        self.layers = nn.Sequential(
            _conv(channels, filters, cube, step), nn.ReLU(), _conv(filters, filters, cube)
        )
        fits = stride == 1 and channels == filters
        self.shortcut = nn.Identity() if fits else _conv(channels, filters, (1, 1, 1), step)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layers(x) + self.shortcut(x))


class ResNet3D(nn.Sequential):
    """ResNet-18 over time, rows and columns (R3D; Tran et al., 2018)."""

    def __init__(self, width: int = 64, depth: int = 2, classes: int = 400) -> None:
        layers: list[nn.Module] = [_conv(3, width, (3, 7, 7), (1, 2, 2)), nn.ReLU()]
        channels = width
        for number in range(4):
            filters = width << number
            for position in range(depth):
                layers.append(FilmBlock(channels, filters, 2 if number and not position else 1))
                channels = filters
        super().__init__(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(channels, classes))


@takes(3, 16, 112, 112)
def resnet3d() -> nn.Module:
    return ResNet3D()


class FramesAndMotion(nn.Module):
    """Every image by itself, then the steps from one to the next: a ResNet's features under a temporal convolution."""

    def __init__(self, width: int = 32, classes: int = 51) -> None:
        super().__init__()
        self.images = nn.Sequential(
            nn.Conv2d(3, width, 5, 2, 2),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, 3, 2, 1),
            nn.ReLU(),
            nn.Conv2d(2 * width, 4 * width, 3, 2, 1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        self.steps = nn.Sequential(
            nn.Conv1d(4 * width, 4 * width, 3, padding=1),
            nn.ReLU(),
            nn.Conv1d(4 * width, 4 * width, 3, padding=1),
        )
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        films, frames = x.shape[:2]
        features = self.images(x.flatten(0, 1)).reshape(films, frames, -1)
        return self.head(torch.relu(self.steps(features.transpose(1, 2))).mean(2))


@takes(8, 3, 112, 112)
def frames_and_motion() -> nn.Module:
    return FramesAndMotion()
