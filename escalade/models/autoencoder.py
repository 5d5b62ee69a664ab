"""The convolutional autoencoder for 32x32 images: 3 -> 256 -> 128 -> 128 -> 256 -> 3 channels."""

from __future__ import annotations

import itertools
import pathlib

import torch
from torch import nn

from escalade.models.flat_file import FlatFile


class ConvAutoencoder(nn.Module):
    """Five 3x3 convolutions; pooled twice on the way down, doubled twice on the way up. Inputs in [0, 1].

    `width` is the channels of the first, which the features have half of.
    """

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.width = width
        channels = (3, width, (width + 1) // 2, (width + 1) // 2, width, 3)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1) for before, after in itertools.pairwise(channels)
        )
        self.pool = nn.MaxPool2d(2)
        self.upsample = nn.Upsample(scale_factor=2, mode="nearest")

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Half the width's channels of a quarter of the sides, 128 of 8x8: the features."""
        for convolution in self.convolutions[:2]:
            x = self.pool(torch.relu(convolution(x)))
        return x

    def decode(self, features: torch.Tensor) -> torch.Tensor:
        for convolution in self.convolutions[2:4]:
            features = self.upsample(torch.relu(convolution(features)))
        return self.convolutions[4](features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


def load_autoencoder(path: str | pathlib.Path, width: int = 256) -> ConvAutoencoder:
    """Reads a file with weight and bias of each convolution, a count in front of each."""
    model = ConvAutoencoder(width)
    file = FlatFile(path)
    for parameter in model.parameters():
        file.fill([parameter], file.count())
    file.end()
    return model.eval()
