"""Residual networks whose blocks weigh channels, pixels or filters by what they see."""

from __future__ import annotations

import torch
from torch import nn

from escalade_bench.zoo.varied.blocks import Around, Layer, classifier, conv, stages, stem, takes


class Weighted(nn.Sequential):
    """ResNet-18 with some attention at the end of every block."""

    def __init__(self, attention: Layer | None, width: int = 64, depth: int = 2, classes: int = 1000) -> None:
        super().__init__(stem(width), *stages(width, depth, attention), classifier(8 * width, classes))


class ECA(nn.Module):
    """Each channel by a factor that its neighbours among the channels decide on (Wang et al., 2020)."""

    def __init__(self, channels: int, size: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, size, padding=size // 2, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        means = x.mean((2, 3))
        return x * torch.sigmoid(self.conv(means.unsqueeze(1))).transpose(1, 2).unsqueeze(-1)


@takes(3, 224, 224)
def eca_resnet() -> nn.Module:
    return Weighted(ECA)


class SE(nn.Module):
    """Each channel by a factor that all channels decide on, through linear layers (Hu et al., 2018)."""

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


@takes(3, 224, 224)
def se_resnet() -> nn.Module:
    return Weighted(SE)


class CBAM(nn.Module):
    """Channels weighed by their means and maxima, then pixels by theirs (Woo et al., 2018)."""

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


@takes(3, 224, 224)
def cbam_resnet() -> nn.Module:
    return Weighted(CBAM)


class SelectiveKernel(nn.Module):
    """Filters of two sizes, of which each channel takes a share that all decide on (Li et al., 2019)."""

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
    """Bottlenecks whose middle convolution chooses its size."""

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


@takes(3, 224, 224)
def sknet() -> nn.Module:
    return SKNet()
