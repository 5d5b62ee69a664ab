"""Generators: GANs, diffusion, style transfer, PixelCNN."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from escalade_bench.zoo.varied.blocks import Around

_GROUPS = 8
_PERIOD = 10_000.0


class DCGenerator(nn.Sequential):
    """DCGAN: a 64x64 image from a vector, by transposed convolutions (Radford et al., 2015)."""

    def __init__(self, latent: int = 100, width: int = 64, channels: int = 3) -> None:
        widths = [8 * width, 4 * width, 2 * width, width]
        layers: list[nn.Module] = [
            nn.ConvTranspose2d(latent, widths[0], 4, bias=False),
            nn.BatchNorm2d(widths[0]),
            nn.ReLU(),
        ]
        for before, after in itertools.pairwise(widths):
            layers += [
                nn.ConvTranspose2d(before, after, 4, 2, 1, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(),
            ]
        super().__init__(*layers, nn.ConvTranspose2d(width, channels, 4, 2, 1, bias=False), nn.Tanh())


class UNetLevel(nn.Module):
    """One level of pix2pix's U-Net: downsampling, the inner levels, upsampling, and a skip connection."""

    def __init__(
        self, channels: int, width: int, inside: nn.Module | None, outermost: bool, dropout: bool
    ) -> None:
        super().__init__()
        self.outermost = outermost
        down: list[nn.Module] = [] if outermost else [nn.LeakyReLU(0.2)]
        down.append(nn.Conv2d(channels, width, 4, 2, 1, bias=False))
        if inside is not None and not outermost:
            down.append(nn.BatchNorm2d(width))
        back = [
            nn.ReLU(),
            nn.ConvTranspose2d(2 * width if inside else width, channels, 4, 2, 1, bias=outermost),
            nn.Tanh() if outermost else nn.BatchNorm2d(channels),
            *([nn.Dropout(0.5)] if dropout else []),
        ]
        self.layers = nn.Sequential(*down, *([inside] if inside else []), *back)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(x)
        return y if self.outermost else torch.cat([x, y], 1)


class UNetGenerator(nn.Module):
    """Image-to-image U-Net of `depth` levels (pix2pix; Isola et al., 2017)."""

    def __init__(self, channels: int = 3, width: int = 64, depth: int = 8) -> None:
        super().__init__()
        widths = [min(width << level, 8 * width) for level in range(depth)]
        inside: nn.Module | None = None
        for level in reversed(range(1, depth)):
            dropout = inside is not None and level >= 4
            inside = UNetLevel(widths[level - 1], widths[level], inside, False, dropout)
        self.levels = UNetLevel(channels, width, inside, True, False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.levels(x)


def _reflected(
    channels: int, filters: int, size: int, stride: int = 1, norm: Callable[[int], nn.Module] | None = None
) -> list[nn.Module]:
    layers: list[nn.Module] = [
        nn.ReflectionPad2d(size // 2),
        nn.Conv2d(channels, filters, size, stride),
    ]
    return layers + ([norm(filters)] if norm else [])


class ResNetGenerator(nn.Sequential):
    """Image-to-image network of residual blocks with instance norms (CycleGAN; Zhu et al., 2017)."""

    def __init__(self, channels: int = 3, width: int = 64, blocks: int = 9) -> None:
        norm, wide = nn.InstanceNorm2d, 4 * width
        layers: list[nn.Module] = [*_reflected(channels, width, 7, norm=norm), nn.ReLU()]
        for before in (width, 2 * width):
            layers += [nn.Conv2d(before, 2 * before, 3, 2, 1), norm(2 * before), nn.ReLU()]
        for _ in range(blocks):
            layers.append(
                Around(
                    *_reflected(wide, wide, 3, norm=norm),
                    nn.ReLU(),
                    *_reflected(wide, wide, 3, norm=norm),
                )
            )
        for before in (wide, 2 * width):
            layers += [
                nn.ConvTranspose2d(before, before // 2, 3, 2, 1, output_padding=1),
                norm(before // 2),
                nn.ReLU(),
            ]
        super().__init__(*layers, *_reflected(width, channels, 7), nn.Tanh())


class StyleTransfer(nn.Sequential):
    """Style transfer: affine instance norms, and nearest upsampling before convolutions (Johnson et al., 2016; Ulyanov
    et al., 2016)."""

    def __init__(self, width: int = 32, blocks: int = 5) -> None:
        def norm(channels: int) -> nn.Module:
            return nn.InstanceNorm2d(channels, affine=True)

        wide = 4 * width
        layers: list[nn.Module] = [*_reflected(3, width, 9, norm=norm), nn.ReLU()]
        for before in (width, 2 * width):
            layers += [*_reflected(before, 2 * before, 3, 2, norm), nn.ReLU()]
        for _ in range(blocks):
            layers.append(
                Around(
                    *_reflected(wide, wide, 3, norm=norm), nn.ReLU(), *_reflected(wide, wide, 3, norm=norm)
                )
            )
        for before in (wide, 2 * width):
            layers += [
                nn.Upsample(scale_factor=2),
                *_reflected(before, before // 2, 3, norm=norm),
                nn.ReLU(),
            ]
        super().__init__(*layers, *_reflected(width, 3, 9))


class MaskedConv(nn.Conv2d):
    """Masked convolution over preceding pixels only; with `itself` also the current one."""

    mask: torch.Tensor

    def __init__(self, channels: int, filters: int, size: int, itself: bool) -> None:
        super().__init__(channels, filters, size, padding=size // 2)
        seen = torch.zeros(size, size)
        seen[: size // 2] = 1
        seen[size // 2, : size // 2 + itself] = 1
        self.register_buffer("mask", seen)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return F.conv2d(input, self.weight * self.mask, self.bias, padding=self.padding)


class PixelCNN(nn.Sequential):
    """PixelCNN: logits of every pixel's value given the preceding pixels (van den Oord et al., 2016)."""

    def __init__(self, channels: int = 1, width: int = 128, blocks: int = 7, values: int = 256) -> None:
        layers: list[nn.Module] = [MaskedConv(channels, width, 7, False)]
        half = width // 2
        for _ in range(blocks):
            layers.append(
                Around(
                    nn.ReLU(),
                    nn.Conv2d(width, half, 1),
                    nn.ReLU(),
                    MaskedConv(half, half, 3, True),
                    nn.ReLU(),
                    nn.Conv2d(half, width, 1),
                )
            )
        layers += [nn.ReLU(), nn.Conv2d(width, width, 1), nn.ReLU(), nn.Conv2d(width, channels * values, 1)]
        super().__init__(*layers)


def sinusoids(times: torch.Tensor, features: int) -> torch.Tensor:
    """Sinusoidal embedding of times."""
    steps = torch.arange(features // 2, device=times.device) / (features // 2)
    angles = times[:, None].float() * torch.exp(-math.log(_PERIOD) * steps)
    return torch.cat([angles.sin(), angles.cos()], 1).to(times.dtype)


class TimedBlock(nn.Module):
    """Residual block with group norms and a time embedding added between its two convolutions."""

    def __init__(self, channels: int, filters: int, embedding: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(_GROUPS, channels), nn.Conv2d(channels, filters, 3, padding=1)
        self.time = nn.Linear(embedding, filters)
        self.norm2, self.conv2 = nn.GroupNorm(_GROUPS, filters), nn.Conv2d(filters, filters, 3, padding=1)
        self.shortcut = nn.Identity() if channels == filters else nn.Conv2d(channels, filters, 1)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        y = self.conv1(F.silu(self.norm1(x)))
        y = y + self.time(F.silu(time))[:, :, None, None]
        return self.shortcut(x) + self.conv2(F.silu(self.norm2(y)))


class PixelAttention(nn.Module):
    """Self-attention over all pixels, with a skip connection."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(_GROUPS, channels)
        self.queries_keys_values = nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.queries_keys_values(self.norm(x)).flatten(2).chunk(3, 1)
        weights = torch.softmax(queries.transpose(1, 2) @ keys * x.shape[1] ** -0.5, -1)
        return x + self.out((values @ weights.transpose(1, 2)).reshape(x.shape))


class DiffusionUNet(nn.Module):
    """Denoising U-Net that predicts the noise at a diffusion step (DDPM; Ho et al., 2020)."""

    def __init__(self, channels: int = 3, width: int = 64, factors: Sequence[int] = (1, 2, 4)) -> None:
        super().__init__()
        self.width, embedding = width, 4 * width
        self.time = nn.Sequential(nn.Linear(width, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.down, self.halved = nn.ModuleList(), nn.ModuleList()
        widths = [width * factor for factor in factors]
        before = width
        for number, after in enumerate(widths):
            self.down.append(TimedBlock(before, after, embedding))
            last = number == len(widths) - 1
            self.halved.append(nn.Identity() if last else nn.Conv2d(after, after, 3, 2, 1))
            before = after
        self.middle1, self.middle2 = (
            TimedBlock(before, before, embedding),
            TimedBlock(before, before, embedding),
        )
        self.attention = PixelAttention(before)
        self.up, self.doubled = nn.ModuleList(), nn.ModuleList()
        for number, after in enumerate(reversed(widths)):
            self.up.append(TimedBlock(before + after, after, embedding))
            last = number == len(widths) - 1
            self.doubled.append(
                nn.Identity()
                if last
                else nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(after, after, 3, padding=1))
            )
            before = after
        self.last = nn.Sequential(
            nn.GroupNorm(_GROUPS, width), nn.SiLU(), nn.Conv2d(width, channels, 3, padding=1)
        )

    def forward(self, x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
        time = self.time(sinusoids(times, self.width))
        x, across = self.first(x), []
        for block, halved in zip(self.down, self.halved, strict=True):
            x = block(x, time)
            across.append(x)
            x = halved(x)
        x = self.middle2(self.attention(self.middle1(x, time)), time)
        for block, doubled in zip(self.up, self.doubled, strict=True):
            x = doubled(block(torch.cat([x, across.pop()], 1), time))
        return self.last(x)


class NoiseMapped(nn.Module):
    """Adapts a denoiser to one tensor: the time is an additional plane after the image's channels."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x[:, :-1], x[:, -1, 0, 0])
