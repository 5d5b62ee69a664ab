"""A denoising network that is told the time: the U-Net of diffusion models."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from escalade_bench.zoo.varied.blocks import takes

_GROUPS = 8
_PERIOD = 10_000.0


def sinusoids(times: torch.Tensor, features: int) -> torch.Tensor:
    """Sines and cosines of times in waves from short to long."""
    steps = torch.arange(features // 2, device=times.device) / (features // 2)
    angles = times[:, None].float() * torch.exp(-math.log(_PERIOD) * steps)
    return torch.cat([angles.sin(), angles.cos()], 1).to(times.dtype)


class TimedBlock(nn.Module):
    """Two convolutions behind group norms, the time added to each channel between them, and the way around."""

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
    """Every pixel looks at all others, and adds what it sees."""

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
    """The noise in an image at a time of its diffusion (DDPM; Ho et al., 2020)."""

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
    """A denoiser whose time comes as a plane behind the image's channels, so that one tensor holds both."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x[:, :-1], x[:, -1, 0, 0])


@takes(4, 64, 64)
def diffusion_unet() -> nn.Module:
    return NoiseMapped(DiffusionUNet())
