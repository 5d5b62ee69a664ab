"""Super-resolution, denoising, deblurring."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from escalade_bench.zoo.varied.blocks import Around, conv


class ESPCN(nn.Sequential):
    """ESPCN: three convolutions on the small image, and a pixel shuffle (Shi et al., 2016)."""

    def __init__(self, scale: int = 3, width: int = 64) -> None:
        super().__init__(
            nn.Conv2d(1, width, 5, padding=2),
            nn.Tanh(),
            nn.Conv2d(width, width // 2, 3, padding=1),
            nn.Tanh(),
            nn.Conv2d(width // 2, scale**2, 3, padding=1),
            nn.PixelShuffle(scale),
        )


class FSRCNN(nn.Sequential):
    """FSRCNN: narrow layers, and a transposed convolution at the end (Dong et al., 2016)."""

    def __init__(self, scale: int = 3, width: int = 56, narrow: int = 12, depth: int = 4) -> None:
        layers: list[nn.Module] = [
            nn.Conv2d(1, width, 5, padding=2),
            nn.PReLU(width),
            nn.Conv2d(width, narrow, 1),
            nn.PReLU(narrow),
        ]
        for _ in range(depth):
            layers += [nn.Conv2d(narrow, narrow, 3, padding=1), nn.PReLU(narrow)]
        layers += [nn.Conv2d(narrow, width, 1), nn.PReLU(width)]
        super().__init__(*layers, nn.ConvTranspose2d(width, 1, 9, scale, 4, output_padding=scale - 1))


class Scaled(nn.Module):
    """Multiplication by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def _upscaling(channels: int, scale: int) -> list[nn.Module]:
    """Repeated doubling by pixel shuffles."""
    layers: list[nn.Module] = []
    while scale > 1:
        layers += [nn.Conv2d(channels, 4 * channels, 3, padding=1), nn.PixelShuffle(2)]
        scale //= 2
    return layers


def _same(channels: int, filters: int) -> nn.Conv2d:
    return nn.Conv2d(channels, filters, 3, padding=1)


class EDSR(nn.Sequential):
    """EDSR: residual blocks without norms, scaled down (Lim et al., 2017)."""

    def __init__(self, scale: int = 2, width: int = 64, blocks: int = 16, factor: float = 0.1) -> None:
        def block() -> Around:
            return Around(_same(width, width), nn.ReLU(), _same(width, width), Scaled(factor))

        body = Around(*(block() for _ in range(blocks)), _same(width, width))
        super().__init__(_same(3, width), body, *_upscaling(width, scale), _same(width, 3))


class ChannelAttention(nn.Module):
    """Channel attention: gates computed from all channel means."""

    def __init__(self, channels: int, fewer: int = 16) -> None:
        super().__init__()
        inner = max(1, channels // fewer)
        self.factors = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, inner, 1),
            nn.ReLU(),
            nn.Conv2d(inner, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factors(x)


class RCAN(nn.Sequential):
    """RCAN: groups of residual blocks with channel attention (Zhang et al., 2018)."""

    def __init__(self, scale: int = 4, width: int = 64, groups: int = 4, blocks: int = 5) -> None:
        def block() -> Around:
            return Around(_same(width, width), nn.ReLU(), _same(width, width), ChannelAttention(width))

        def group() -> Around:
            return Around(*(block() for _ in range(blocks)), _same(width, width))

        body = Around(*(group() for _ in range(groups)), _same(width, width))
        super().__init__(_same(3, width), body, *_upscaling(width, scale), _same(width, 3))


class DnCNN(nn.Module):
    """DnCNN: seventeen layers predict the noise, which is subtracted (Zhang et al., 2017)."""

    def __init__(self, channels: int = 1, width: int = 64, depth: int = 17) -> None:
        super().__init__()
        self.noise = nn.Sequential(
            _same(channels, width),
            nn.ReLU(),
            *(conv(width, width) for _ in range(depth - 2)),
            nn.Conv2d(width, channels, 3, padding=1, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.noise(x)


class PixelNorm(nn.Module):
    """Layer norm over the channels of each pixel, written for NCHW."""

    def __init__(self, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centered = x - x.mean(1, keepdim=True)
        y = centered / (centered.square().mean(1, keepdim=True) + self.eps).sqrt()
        return y * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


class SimpleGate(nn.Module):
    """Product of both halves of the channels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = x.chunk(2, 1)
        return one * other


class NAFBlock(nn.Module):
    """NAFNet block: a gated convolution with channel attention, then a gated MLP of 1x1 convolutions, no activation."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        wide = 2 * channels
        self.spatial = nn.Sequential(
            PixelNorm(channels),
            nn.Conv2d(channels, wide, 1),
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide),
            SimpleGate(),
        )
        self.weights = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, channels, 1))
        self.mixed = nn.Conv2d(channels, channels, 1)
        self.pointwise = nn.Sequential(
            PixelNorm(channels), nn.Conv2d(channels, wide, 1), SimpleGate(), nn.Conv2d(channels, channels, 1)
        )
        self.beta = nn.Parameter(torch.zeros(1, channels, 1, 1))
        self.gamma = nn.Parameter(torch.zeros(1, channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.spatial(x)
        y = x + self.mixed(y * self.weights(y)) * self.beta
        return y + self.pointwise(y) * self.gamma


class NAFNet(nn.Module):
    """A U-Net of gated blocks for deblurring and denoising (Chen et al., 2022)."""

    def __init__(
        self,
        width: int = 32,
        down: Sequence[int] = (1, 1, 4),
        middle: int = 1,
        up: Sequence[int] = (1, 1, 1),
    ) -> None:
        super().__init__()
        self.first, self.last = _same(3, width), _same(width, 3)
        self.down, self.halved, self.doubled, self.up = (nn.ModuleList() for _ in range(4))
        for depth in down:
            self.down.append(nn.Sequential(*(NAFBlock(width) for _ in range(depth))))
            self.halved.append(nn.Conv2d(width, 2 * width, 2, 2))
            width *= 2
        self.middle = nn.Sequential(*(NAFBlock(width) for _ in range(middle)))
        for depth in up:
            self.doubled.append(nn.Sequential(nn.Conv2d(width, 2 * width, 1, bias=False), nn.PixelShuffle(2)))
            width //= 2
            self.up.append(nn.Sequential(*(NAFBlock(width) for _ in range(depth))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, across = self.first(x), []
        for blocks, halved in zip(self.down, self.halved, strict=True):
            y = blocks(y)
            across.append(y)
            y = halved(y)
        y = self.middle(y)
        for doubled, blocks in zip(self.doubled, self.up, strict=True):
            y = blocks(doubled(y) + across.pop())
        return x + self.last(y)


class ZeroDCE(nn.Module):
    """Zero-DCE: iterated curves that brighten a dark image with values from 0 to 1 (Guo et al., 2020)."""

    def __init__(self, width: int = 32, iterations: int = 8) -> None:
        super().__init__()
        self.down = nn.ModuleList(_same(3 if not number else width, width) for number in range(4))
        self.up = nn.ModuleList(_same(2 * width, width) for _ in range(2))
        self.curves = _same(2 * width, 3 * iterations)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clamp(0, 1)
        seen = [x]
        for layer in self.down:
            seen.append(F.relu(layer(seen[-1])))
        y = seen[4]
        for layer, beside in zip(self.up, (seen[3], seen[2]), strict=True):
            y = F.relu(layer(torch.cat([beside, y], 1)))
        for curve in torch.tanh(self.curves(torch.cat([seen[1], y], 1))).split(3, 1):
            x = x + curve * (x * x - x)
        return x
