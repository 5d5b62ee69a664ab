"""U-Net for semantic segmentation."""

from __future__ import annotations

import torch
from torch import nn

from escalade.errors import UnsupportedError


def _double_conv(channels: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before in (channels, width):
        layers += [
            nn.Conv2d(before, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class Up(nn.Module):
    """Upsamples by 2 and concatenates the skip connection."""

    def __init__(self, channels: int, width: int, upsample: bool) -> None:
        super().__init__()
        self.up: nn.Module
        if upsample:
            self.up = nn.Sequential(
                nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(channels, width, 1)
            )
        else:
            self.up = nn.ConvTranspose2d(channels, width, 2, 2)
        self.conv = _double_conv(2 * width, width)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return self.conv(torch.cat([skip, self.up(x)], 1))


class UNet(nn.Module):
    """Halves the size and doubles the width `depth` times, then upsamples with transposed convolutions.

    With `upsample`, nearest-neighbor upsampling and a 1x1 convolution replace the transposed convolutions. The sides of
    an image must be multiples of 2 ** depth.
    """

    def __init__(
        self, channels: int = 3, classes: int = 2, width: int = 64, depth: int = 4, upsample: bool = False
    ) -> None:
        super().__init__()
        if min(channels, classes, width, depth) < 1:
            raise UnsupportedError(
                f"channels={channels}, classes={classes}, width={width}, depth={depth}: each must be at least 1"
            )
        widths = [width << level for level in range(depth + 1)]
        self.pool = nn.MaxPool2d(2)
        self.down = nn.ModuleList(
            _double_conv(before, after)
            for before, after in zip([channels, *widths[:-1]], widths, strict=True)
        )
        self.up = nn.ModuleList(Up(2 * after, after, upsample) for after in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for level, conv in enumerate(self.down):
            x = conv(self.pool(x) if level else x)
            skips.append(x)
        for up, skip in zip(self.up, reversed(skips[:-1]), strict=True):
            x = up(x, skip)
        return self.head(x)
