"""Sequences and videos: dilated causal convolutions, raw waveforms, 3-D and temporal convolutions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn


class CausalConv(nn.Conv1d):
    """Causal convolution."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        before = (self.kernel_size[0] - 1) * self.dilation[0]
        return super().forward(F.pad(input, (before, 0)))


class GatedBlock(nn.Module):
    """WaveNet block: a gated dilated convolution with residual and skip outputs."""

    def __init__(self, channels: int, skipped: int, dilation: int) -> None:
        super().__init__()
        self.filter = CausalConv(channels, channels, 2, dilation=dilation)
        self.gate = CausalConv(channels, channels, 2, dilation=dilation)
        self.out, self.skip = nn.Conv1d(channels, channels, 1), nn.Conv1d(channels, skipped, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.tanh(self.filter(x)) * torch.sigmoid(self.gate(x))
        return x + self.out(y), self.skip(y)


class WaveNet(nn.Module):
    """WaveNet: logits of each sample given the preceding ones (van den Oord et al., 2016)."""

    def __init__(
        self, width: int = 64, skipped: int = 128, depth: int = 8, stacks: int = 2, values: int = 256
    ) -> None:
        super().__init__()
        self.first = CausalConv(1, width, 2)
        self.blocks = nn.ModuleList(
            GatedBlock(width, skipped, 1 << level) for _ in range(stacks) for level in range(depth)
        )
        self.last = nn.Sequential(
            nn.ReLU(), nn.Conv1d(skipped, skipped, 1), nn.ReLU(), nn.Conv1d(skipped, values, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skipped = self.first(x), []
        for block in self.blocks:
            x, skip = block(x)
            skipped.append(skip)
        return self.last(sum(skipped[1:], skipped[0]))


class TemporalBlock(nn.Module):
    """Residual block of two dilated causal convolutions with weight norm."""

    def __init__(self, channels: int, filters: int, size: int, dilation: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before in (channels, filters):
            layer = CausalConv(before, filters, size, dilation=dilation)
            layers += [nn.utils.parametrizations.weight_norm(layer), nn.ReLU(), nn.Dropout(0.2)]
        self.layers = nn.Sequential(*layers)
        self.shortcut = nn.Identity() if channels == filters else nn.Conv1d(channels, filters, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.shortcut(x) + self.layers(x))


class TCN(nn.Module):
    """Temporal convolutional network: class of a sequence from its last step (Bai et al., 2018)."""

    def __init__(
        self, channels: int = 16, widths: Sequence[int] = (128,) * 6, size: int = 5, classes: int = 10
    ) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                TemporalBlock(before, after, size, 1 << level)
                for level, (before, after) in enumerate(zip([channels, *widths], widths, strict=False))
            )
        )
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x)[:, :, -1])


class M5(nn.Module):
    """M5: spoken words from raw waveforms (Dai et al., 2017)."""

    def __init__(self, width: int = 128, classes: int = 35) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for before, after, size, stride in (
            (1, width, 80, 4), (width, width, 3, 1), (width, 2 * width, 3, 1), (2 * width, 4 * width, 3, 1),
        ):  # fmt: skip
            layers += [
                nn.Conv1d(before, after, size, stride),
                nn.BatchNorm1d(after),
                nn.ReLU(),
                nn.MaxPool1d(4),
            ]
        self.features = nn.Sequential(*layers)
        self.head = nn.Linear(4 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.features(x)
        y = F.avg_pool1d(y, y.shape[-1]).permute(0, 2, 1)
        return F.log_softmax(self.head(y), dim=2)


def _conv(
    channels: int, filters: int, size: tuple[int, int, int], stride: tuple[int, int, int] = (1, 1, 1)
) -> nn.Sequential:
    before, rows, columns = size
    padding = (before // 2, rows // 2, columns // 2)
    return nn.Sequential(
        nn.Conv3d(channels, filters, size, stride, padding, bias=False), nn.BatchNorm3d(filters)
    )


class FilmBlock(nn.Module):
    """Residual block of two 3x3x3 convolutions."""

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


class FramesAndMotion(nn.Module):
    """A ResNet per frame, then a temporal convolution over its features."""

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
