"""Dense prediction: segmentation, keypoint heatmaps, and detection at several scales."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from escalade_bench.zoo.varied.blocks import Around, basic_block, conv, stages, stem


class ASPP(nn.Module):
    """Atrous spatial pyramid pooling: parallel convolutions of several dilations, and a global mean."""

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
    """Dilated convolutions on a small ResNet, joined with earlier features (DeepLabv3+; Chen et al., 2018)."""

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


class Exchange(nn.Module):
    """Blocks at every resolution, then an exchange: each resolution becomes the sum of all, resized."""

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
    """HRNet: three parallel resolutions with repeated exchange (Wang et al., 2019)."""

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
    """Hourglass level: a branch at half size, and one at full size."""

    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        self.beside, self.down, self.back = (_preactivated(channels) for _ in range(3))
        self.inside = HourglassLevel(channels, depth - 1) if depth > 1 else _preactivated(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        small = self.back(self.inside(self.down(F.max_pool2d(x, 2))))
        return self.beside(x) + F.interpolate(small, scale_factor=2.0)


class Hourglass(nn.Module):
    """Two stacked hourglasses, each with its own heatmaps (Newell et al., 2016)."""

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


class Pyramid(nn.Module):
    """Feature pyramid with a top-down path (FPN; Lin et al., 2017)."""

    def __init__(self, channels: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(each, width, 1) for each in channels)
        self.smooth = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in channels)
        self.sixth = nn.Conv2d(channels[-1], width, 3, 2, 1)
        self.seventh = nn.Conv2d(width, width, 3, 2, 1)

    def forward(self, images: list[torch.Tensor]) -> list[torch.Tensor]:
        levels = [lateral(x) for lateral, x in zip(self.lateral, images, strict=True)]
        for at in reversed(range(len(levels) - 1)):
            levels[at] = levels[at] + F.interpolate(levels[at + 1], size=levels[at].shape[-2:])
        levels = [smooth(x) for smooth, x in zip(self.smooth, levels, strict=True)]
        sixth = self.sixth(images[-1])
        return [*levels, sixth, self.seventh(torch.relu(sixth))]


class RetinaNet(nn.Module):
    """RetinaNet: classes and boxes per anchor, by heads shared across pyramid levels (Lin et al., 2017)."""

    def __init__(
        self, width: int = 64, depth: int = 2, features: int = 256, anchors: int = 9, classes: int = 80
    ) -> None:
        super().__init__()
        self.classes = classes
        self.stem = stem(width)
        self.stages = nn.ModuleList(stages(width, depth))
        self.pyramid = Pyramid((2 * width, 4 * width, 8 * width), features)
        self.scores, self.boxes = (self._head(features, anchors * each) for each in (classes, 4))

    @staticmethod
    def _head(features: int, filters: int) -> nn.Sequential:
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Conv2d(features, features, 3, padding=1), nn.ReLU()]
        return nn.Sequential(*layers, nn.Conv2d(features, filters, 3, padding=1))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x, images = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            images.append(x)
        levels = self.pyramid(images[1:])
        scores = [self._rows(self.scores(level), self.classes) for level in levels]
        boxes = [self._rows(self.boxes(level), 4) for level in levels]
        return {"scores": torch.cat(scores, 1).sigmoid(), "boxes": torch.cat(boxes, 1)}

    @staticmethod
    def _rows(x: torch.Tensor, numbers: int) -> torch.Tensor:
        """Reshape to one row per anchor."""
        return x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, numbers)


def _silu(channels: int, filters: int, size: int = 1, stride: int = 1) -> nn.Sequential:
    return conv(channels, filters, size, stride, activation=nn.SiLU)


class CrossStage(nn.Module):
    """Cross-stage partial block: half of the channels bypass the residual blocks (CSPNet; Wang et al., 2020)."""

    def __init__(self, channels: int, filters: int, depth: int, around: bool = True) -> None:
        super().__init__()
        half = filters // 2
        blocks = (nn.Sequential(_silu(half, half), _silu(half, half, 3)) for _ in range(depth))
        self.through = nn.Sequential(
            _silu(channels, half), *(Around(block) if around else block for block in blocks)
        )
        self.past, self.joined = _silu(channels, half), _silu(2 * half, filters)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.joined(torch.cat([self.through(x), self.past(x)], 1))


class PooledPyramid(nn.Module):
    """Spatial pyramid pooling: max pools of growing windows, concatenated (SPP; He et al., 2014)."""

    def __init__(self, channels: int, size: int = 5) -> None:
        super().__init__()
        half = channels // 2
        self.first, self.last = _silu(channels, half), _silu(4 * half, channels)
        self.pool = nn.MaxPool2d(size, 1, size // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = [self.first(x)]
        for _ in range(3):
            seen.append(self.pool(seen[-1]))
        return self.last(torch.cat(seen, 1))


class CSPDetector(nn.Module):
    """Three detection grids from a CSP backbone with a path-aggregation neck (YOLOv4; Bochkovskiy et al., 2020)."""

    def __init__(self, width: int = 32, depth: int = 1, anchors: int = 3, classes: int = 80) -> None:
        super().__init__()
        w = width
        self.third = nn.Sequential(
            _silu(3, w, 6, 2), _silu(w, 2 * w, 3, 2), CrossStage(2 * w, 2 * w, depth),
            _silu(2 * w, 4 * w, 3, 2), CrossStage(4 * w, 4 * w, 2 * depth),
        )  # fmt: skip
        self.fourth = nn.Sequential(_silu(4 * w, 8 * w, 3, 2), CrossStage(8 * w, 8 * w, 2 * depth))
        self.fifth = nn.Sequential(
            _silu(8 * w, 16 * w, 3, 2), CrossStage(16 * w, 16 * w, depth), PooledPyramid(16 * w)
        )
        self.narrow5, self.narrow4 = _silu(16 * w, 8 * w), _silu(8 * w, 4 * w)
        self.up4 = CrossStage(16 * w, 8 * w, depth, around=False)
        self.up3 = CrossStage(8 * w, 4 * w, depth, around=False)
        self.halved3, self.halved4 = _silu(4 * w, 4 * w, 3, 2), _silu(8 * w, 8 * w, 3, 2)
        self.down4 = CrossStage(8 * w, 8 * w, depth, around=False)
        self.down5 = CrossStage(16 * w, 16 * w, depth, around=False)
        self.anchors = anchors
        self.heads = nn.ModuleList(nn.Conv2d(n * w, anchors * (classes + 5), 1) for n in (4, 8, 16))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        third = self.third(x)
        fourth = self.fourth(third)
        five = self.narrow5(self.fifth(fourth))
        four = self.narrow4(self.up4(torch.cat([F.interpolate(five, scale_factor=2.0), fourth], 1)))
        three = self.up3(torch.cat([F.interpolate(four, scale_factor=2.0), third], 1))
        middle = self.down4(torch.cat([self.halved3(three), four], 1))
        small = self.down5(torch.cat([self.halved4(middle), five], 1))
        return [self._grid(head(x)) for head, x in zip(self.heads, (three, middle, small), strict=True)]

    def _grid(self, x: torch.Tensor) -> torch.Tensor:
        """Return boxes per anchor and cell in the last dimension, between 0 and 1."""
        batch, _, height, width = x.shape
        return x.view(batch, self.anchors, -1, height, width).permute(0, 1, 3, 4, 2).sigmoid()
