"""Convolutional autoencoder for 32x32 images: 3 -> 256 -> 128 -> 128 -> 256 -> 3 channels."""

from __future__ import annotations

import itertools
import pathlib

import torch
from torch import nn

from escalade.models.flat_file import FlatFile


class ConvAutoencoder(nn.Module):
    """Five 3x3 convolutions with two max pools in the encoder and two upsamples in the decoder. Inputs are in [0, 1].

    `width` is the number of channels of the first convolution; the features have half as many.
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
        """Return the features: width / 2 channels at a quarter of the side, by default 128 of 8x8."""
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
    """Read a flat file with the weight and bias of each convolution, each preceded by its size."""
    model = ConvAutoencoder(width)
    file = FlatFile(path)
    for parameter in model.parameters():
        file.fill([parameter], file.count())
    file.end()
    return model.eval()
