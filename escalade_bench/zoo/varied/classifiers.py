"""Classifiers with attention over channels or pixels, or with cheaper filters, and a siamese network."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from escalade_bench.zoo.varied.blocks import Around, Layer, basic_block, classifier, conv, stages, stem


class Weighted(nn.Sequential):
    """ResNet-18 with an attention module at the end of every block."""

    def __init__(self, attention: Layer | None, width: int = 64, depth: int = 2, classes: int = 1000) -> None:
        super().__init__(stem(width), *stages(width, depth, attention), classifier(8 * width, classes))


class ECA(nn.Module):
    """Efficient channel attention: gates from a 1-D convolution over channel means (Wang et al., 2020)."""

    def __init__(self, channels: int, size: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, size, padding=size // 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        means = x.mean((2, 3))
        return x * torch.sigmoid(self.conv(means.unsqueeze(1))).transpose(1, 2).unsqueeze(-1)


class SE(nn.Module):
    """Squeeze-and-excite: gates from two linear layers over channel means (Hu et al., 2018)."""

    def __init__(self, channels: int, fewer: int = 16) -> None:
        super().__init__()
        inner = max(1, channels // fewer)
        self.factors = nn.Sequential(
            nn.Linear(channels, inner, bias=False),
            nn.ReLU(),
            nn.Linear(inner, channels, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, channels = x.shape[:2]
        factors = self.factors(nn.functional.adaptive_avg_pool2d(x, 1).view(batch, channels))
        return x * factors.view(batch, channels, 1, 1).expand_as(x)


class CBAM(nn.Module):
    """CBAM: channel gates from means and maxima, then pixel gates (Woo et al., 2018)."""

    def __init__(self, channels: int, fewer: int = 16) -> None:
        super().__init__()
        inner = max(1, channels // fewer)
        self.shared = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False), nn.ReLU(), nn.Conv2d(inner, channels, 1, bias=False)
        )
        self.pixels = nn.Conv2d(2, 1, 7, padding=3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        means, maxima = x.mean((2, 3), keepdim=True), x.amax((2, 3), keepdim=True)
        x = x * torch.sigmoid(self.shared(means) + self.shared(maxima))
        seen = torch.cat([x.mean(1, keepdim=True), x.max(1, keepdim=True).values], 1)
        return x * torch.sigmoid(self.pixels(seen))


class SelectiveKernel(nn.Module):
    """Selective kernel: two filter sizes, blended per channel by softmax attention (Li et al., 2019)."""

    def __init__(self, channels: int, groups: int = 8, fewer: int = 4) -> None:
        super().__init__()
        inner = max(4, channels // fewer)
        self.branches = nn.ModuleList(
            conv(channels, channels, dilation=dilation, groups=groups) for dilation in (1, 2)
        )
        self.squeezed = nn.Sequential(
            nn.Linear(channels, inner, bias=False), nn.BatchNorm1d(inner), nn.ReLU()
        )
        self.shares = nn.Linear(inner, 2 * channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = torch.stack([branch(x) for branch in self.branches], 1)
        squeezed = self.squeezed(seen.sum(1).mean((-2, -1)))
        shares = torch.softmax(self.shares(squeezed).unflatten(1, (2, -1)), 1)
        return (seen * shares[..., None, None]).sum(1)


class SKNet(nn.Sequential):
    """ResNet bottlenecks with a selective kernel in the middle."""

    def __init__(self, width: int = 64, depth: int = 2, classes: int = 1000) -> None:
        layers: list[nn.Module] = [stem(width)]
        channels = width
        for number in range(3):
            filters = 2 * width << number
            for position in range(depth):
                fits = channels == filters
                block = Around(
                    conv(channels, filters // 2, 1),
                    SelectiveKernel(filters // 2),
                    conv(filters // 2, filters, 1, activation=nn.Identity),
                    shortcut=None if fits else conv(channels, filters, 1, activation=nn.Identity),
                    activation=nn.ReLU(),
                )
                layers.append(block)
                channels = filters
                if position == depth - 1 and number < 2:
                    layers.append(nn.AvgPool2d(2))
        super().__init__(*layers, classifier(channels, classes))


class CoordConv(nn.Module):
    """CoordConv: a convolution with coordinates and radius as additional channels (Liu et al., 2018)."""

    def __init__(self, channels: int, filters: int, size: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels + 3, filters, size, stride, size // 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        height, width = x.shape[-2:]
        rows = torch.linspace(-1, 1, height, dtype=x.dtype, device=x.device)[:, None].expand(height, width)
        columns = torch.linspace(-1, 1, width, dtype=x.dtype, device=x.device).expand(height, width)
        seen = torch.stack([rows, columns, (rows.square() + columns.square()).sqrt()])
        return self.conv(torch.cat([x, seen.expand(x.shape[0], 3, height, width)], 1))


class CoordNet(nn.Sequential):
    """A few convolutions with coordinates, and a classifier."""

    def __init__(self, widths: Sequence[int] = (32, 64, 128, 256), classes: int = 100) -> None:
        layers: list[nn.Module] = []
        for before, after in zip([3, *widths], widths, strict=False):
            layers += [CoordConv(before, after, stride=2), nn.BatchNorm2d(after), nn.ReLU()]
        super().__init__(*layers, classifier(widths[-1], classes))


class Ghost(nn.Module):
    """Ghost module: half of the filters, and a cheap depthwise convolution of each (Han et al., 2020)."""

    def __init__(self, channels: int, filters: int, relu: bool) -> None:
        super().__init__()
        half = -(-filters // 2)
        activation = nn.ReLU if relu else nn.Identity
        self.filters = filters
        self.primary = conv(channels, half, 1, activation=activation)
        self.cheap = conv(half, half, groups=half, activation=activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.primary(x)
        return torch.cat([y, self.cheap(y)], 1)[:, : self.filters]


def _ghost_bottleneck(channels: int, wide: int, filters: int, size: int, stride: int) -> Around:
    middle = []
    if stride > 1:
        middle = [conv(wide, wide, size, stride, groups=wide, activation=nn.Identity)]
    shortcut = None
    if stride > 1 or channels != filters:
        shortcut = nn.Sequential(
            conv(channels, channels, size, stride, groups=channels, activation=nn.Identity),
            conv(channels, filters, 1, activation=nn.Identity),
        )
    return Around(Ghost(channels, wide, True), *middle, Ghost(wide, filters, False), shortcut=shortcut)


class GhostNet(nn.Sequential):
    """Bottlenecks of ghost modules; a stage is expansion, filters, filter size and stride."""

    def __init__(
        self,
        stages: Sequence[tuple[int, int, int, int]] = (
            (16, 16, 3, 1), (48, 24, 3, 2), (72, 24, 3, 1), (72, 40, 5, 2), (120, 40, 5, 1), (240, 80, 3, 2),
            (200, 80, 3, 1), (184, 80, 3, 1), (480, 112, 3, 1), (672, 160, 5, 2), (960, 160, 5, 1),
        ),
        classes: int = 1000,
    ) -> None:  # fmt: skip
        layers: list[nn.Module] = [conv(3, 16, stride=2)]
        channels = 16
        for wide, filters, size, stride in stages:
            layers.append(_ghost_bottleneck(channels, wide, filters, size, stride))
            channels = filters
        wide = stages[-1][0]
        super().__init__(*layers, conv(channels, wide, 1), classifier(wide, classes))


class StandardisedConv(nn.Conv2d):
    """Weight standardization: filters are normalized at every call (Qiao et al., 2019)."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        variance, mean = torch.var_mean(self.weight, (1, 2, 3), keepdim=True, correction=0)
        weight = (self.weight - mean) / (variance * math.prod(self.weight.shape[1:]) + 1e-5).sqrt()
        return F.conv2d(input, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class StandardisedBlock(nn.Module):
    """Pre-activation bottleneck: group norm and ReLU before each of three standardized convolutions."""

    def __init__(self, channels: int, filters: int, stride: int, groups: int) -> None:
        super().__init__()
        inner = filters // 4
        self.norm = nn.Sequential(nn.GroupNorm(groups, channels), nn.ReLU())
        self.layers = nn.Sequential(
            StandardisedConv(channels, inner, 1, bias=False),
            nn.GroupNorm(groups, inner),
            nn.ReLU(),
            StandardisedConv(inner, inner, 3, stride, 1, bias=False),
            nn.GroupNorm(groups, inner),
            nn.ReLU(),
            StandardisedConv(inner, filters, 1, bias=False),
        )
        fits = stride == 1 and channels == filters
        self.shortcut = None if fits else StandardisedConv(channels, filters, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return self.layers(y) + (x if self.shortcut is None else self.shortcut(y))


class StandardisedResNet(nn.Sequential):
    """ResNet-v2 with group norms and standardized weights (BiT; Kolesnikov et al., 2020)."""

    def __init__(
        self, width: int = 64, depths: Sequence[int] = (2, 2, 2, 2), groups: int = 32, classes: int = 1000
    ) -> None:
        channels = width
        layers: list[nn.Module] = [
            StandardisedConv(3, width, 7, 2, 3, bias=False),
            nn.ConstantPad2d(1, 0.0),
            nn.MaxPool2d(3, 2),
        ]
        for number, depth in enumerate(depths):
            filters = 4 * width << number
            for position in range(depth):
                stride = 2 if number and not position else 1
                layers.append(StandardisedBlock(channels, filters, stride, min(groups, channels)))
                channels = filters
        layers += [nn.GroupNorm(groups, channels), nn.ReLU()]
        super().__init__(*layers, classifier(channels, classes))


class Siamese(nn.Module):
    """Siamese network: similarity of two images from the distance of their features (Koch et al., 2015)."""

    def __init__(self, width: int = 32, features: int = 128) -> None:
        super().__init__()
        self.network = nn.Sequential(
            conv(1, width, 7, 2),
            basic_block(width, 2 * width, 2),
            basic_block(2 * width, 4 * width, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * width, features),
        )
        self.alike = nn.Linear(features, 1)

    def forward(self, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = (F.normalize(self.network(x), dim=1) for x in (one, other))
        return torch.sigmoid(self.alike((first - second).abs())).squeeze(1), (first * second).sum(1)


class OnPairs(nn.Module):
    """Adapts a network of two images to one tensor of pairs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.network(*x.unbind(1))
