"""A value for every pixel: segmentation, and maps of keypoints."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from escalade.models.unet import UNet
from escalade_bench.zoo.varied.blocks import Around, basic_block, conv, stem, takes


@takes(3, 512, 512)
def unet_512() -> nn.Module:
    """A U-Net with transposed convolutions on large images (Ronneberger et al., 2015)."""
    return UNet()


class ASPP(nn.Module):
    """Convolutions of several dilations side by side, and the mean over the image beside them."""

    def __init__(self, channels: int, width: int, rates: Sequence[int]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(
            [conv(channels, width, 1), *(conv(channels, width, dilation=rate) for rate in rates)]
        )
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), conv(channels, width, 1))
        self.joined = nn.Sequential(conv((len(rates) + 2) * width, width, 1), nn.Dropout(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pooled = F.interpolate(self.pooled(x), x.shape[-2:], mode="bilinear", align_corners=False)
        return self.joined(torch.cat([*(branch(x) for branch in self.branches), pooled], 1))


class DeepLab(nn.Module):
    """Dilated convolutions behind a small ResNet, joined with earlier features (DeepLabv3+; Chen et al., 2018)."""

    def __init__(self, width: int = 64, classes: int = 21, rates: Sequence[int] = (6, 12, 18)) -> None:
        super().__init__()
        self.early = nn.Sequential(stem(width), basic_block(width, width))
        self.late = nn.Sequential(
            basic_block(width, 2 * width, 2),
            basic_block(2 * width, 4 * width, 2),
            basic_block(4 * width, 4 * width),
        )
        self.aspp = ASPP(4 * width, 4 * width, rates)
        self.narrowed = conv(width, 48, 1)
        self.head = nn.Sequential(conv(4 * width + 48, 4 * width), nn.Conv2d(4 * width, classes, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = self.early(x)
        seen = F.interpolate(self.aspp(self.late(early)), early.shape[-2:], mode="bilinear")
        y = self.head(torch.cat([seen, self.narrowed(early)], 1))
        return F.interpolate(y, x.shape[-2:], mode="bilinear", align_corners=False)


@takes(3, 256, 256)
def deeplab() -> nn.Module:
    return DeepLab()


class Exchange(nn.Module):
    """Blocks at every resolution, and then each resolution the sum of all, brought to its size."""

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(basic_block(width, width) for width in widths)
        resolutions = range(len(widths))
        self.paths = nn.ModuleList(
            self._path(widths, source, target) for target in resolutions for source in resolutions
        )

    @staticmethod
    def _path(widths: Sequence[int], source: int, target: int) -> nn.Module:
        if source == target:
            return nn.Identity()
        if source > target:
            scale = nn.Upsample(scale_factor=2 ** (source - target))
            return nn.Sequential(conv(widths[source], widths[target], 1, activation=nn.Identity), scale)
        steps = [conv(widths[source], widths[source], stride=2) for _ in range(target - source - 1)]
        return nn.Sequential(*steps, conv(widths[source], widths[target], stride=2, activation=nn.Identity))

    def forward(self, images: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        done = [block(x) for block, x in zip(self.blocks, images, strict=True)]
        given = []
        for first in range(0, len(self.paths), len(done)):
            brought = [self.paths[first + source](x) for source, x in enumerate(done)]
            given.append(torch.relu(torch.stack(brought).sum(0)))
        return given


class HRNet(nn.Module):
    """Three resolutions side by side that keep exchanging what they have (Wang et al., 2019)."""

    def __init__(self, width: int = 32, exchanges: int = 3, keypoints: int = 17) -> None:
        super().__init__()
        widths = [width, 2 * width, 4 * width]
        self.stem = nn.Sequential(conv(3, 2 * width, stride=2), conv(2 * width, width, stride=2))
        self.further = nn.ModuleList(
            conv(before, after, stride=2) for before, after in itertools.pairwise(widths)
        )
        self.exchanges = nn.ModuleList(Exchange(widths) for _ in range(exchanges))
        self.head = nn.Conv2d(sum(widths), keypoints, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = [self.stem(x)]
        for further in self.further:
            images.append(further(images[-1]))
        for exchange in self.exchanges:
            images = exchange(images)
        size = images[0].shape[-2:]
        brought = [F.interpolate(x, size, mode="bilinear", align_corners=True) for x in images[1:]]
        return self.head(torch.cat([images[0], *brought], 1))


@takes(3, 256, 192)
def hrnet() -> nn.Module:
    return HRNet()


def _preactivated(channels: int) -> Around:
    half = channels // 2
    return Around(
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, half, 1),
        nn.BatchNorm2d(half),
        nn.ReLU(),
        nn.Conv2d(half, half, 3, padding=1),
        nn.BatchNorm2d(half),
        nn.ReLU(),
        nn.Conv2d(half, channels, 1),
    )


class HourglassLevel(nn.Module):
    """Half the size and back again, beside what stays at full size."""

    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        self.beside, self.down, self.back = (_preactivated(channels) for _ in range(3))
        self.inside = HourglassLevel(channels, depth - 1) if depth > 1 else _preactivated(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small = self.back(self.inside(self.down(F.max_pool2d(x, 2))))
        return self.beside(x) + F.interpolate(small, scale_factor=2.0)


class Hourglass(nn.Module):
    """Two hourglasses in a row, each with maps of keypoints of its own (Newell et al., 2016)."""

    def __init__(self, width: int = 128, depth: int = 4, keypoints: int = 16) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            conv(3, width // 2, 7, 2),
            conv(width // 2, width, 1),
            _preactivated(width),
            nn.MaxPool2d(2),
            _preactivated(width),
        )
        self.glasses = nn.ModuleList(
            nn.Sequential(HourglassLevel(width, depth), conv(width, width, 1)) for _ in range(2)
        )
        self.maps = nn.ModuleList(nn.Conv2d(width, keypoints, 1) for _ in range(2))
        self.features_back = nn.Conv2d(width, width, 1)
        self.maps_back = nn.Conv2d(keypoints, width, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.stem(x)
        features = self.glasses[0](x)
        first = self.maps[0](features)
        x = x + self.features_back(features) + self.maps_back(first)
        return first, self.maps[1](self.glasses[1](x))


@takes(3, 256, 256)
def hourglass() -> nn.Module:
    return Hourglass()
