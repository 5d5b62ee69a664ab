"""Boxes and classes at several sizes at once: pyramids of features, and the heads on them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from escalade_bench.zoo.varied.blocks import Around, conv, stages, stem, takes


class Pyramid(nn.Module):
    """Features of several sizes, each with what the smaller ones know (FPN; Lin et al., 2017)."""

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
    """Classes and boxes of every anchor, by heads that all levels of a pyramid share (Lin et al., 2017)."""

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
        """An anchor's numbers as a row."""
        return x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, numbers)


@takes(3, 256, 256)
def retinanet() -> nn.Module:
    return RetinaNet()


def _silu(channels: int, filters: int, size: int = 1, stride: int = 1) -> nn.Sequential:
    return conv(channels, filters, size, stride, activation=nn.SiLU)


class CrossStage(nn.Module):
    """Half of the channels through residual blocks, the other half past them (CSPNet; Wang et al., 2020)."""

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
    """Maxima over larger and larger windows, side by side (SPP; He et al., 2014)."""

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
    """Three grids of boxes from cross-stage blocks, down and up and down again (YOLOv4; Bochkovskiy et al., 2020)."""

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
        """A box of every anchor in every cell as the last dimension, between 0 and 1."""
        batch, _, height, width = x.shape
        return x.view(batch, self.anchors, -1, height, width).permute(0, 1, 3, 4, 2).sigmoid()


@takes(3, 416, 416)
def csp_detector() -> nn.Module:
    return CSPDetector()
