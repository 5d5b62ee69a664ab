"""Autoencoders: of 32x32 images, and of spectrogram frames for anomaly detection by reconstruction error."""

from __future__ import annotations

import itertools
import pathlib
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn

from escalade.errors import UnsupportedError
from escalade.models.weight_files import FlatFile
from escalade.ops.mlp import Layer, mlp
from escalade.ops.mlp.problem import spelled


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


class SpectralAutoencoder(nn.Module):
    """Encodes each frame of mel bands, projects the concatenated frames on a small basis of unit vectors, and back."""

    def __init__(self, bands: int = 64, frames: int = 5, latent: int = 32) -> None:
        super().__init__()
        if min(bands, frames, latent) < 1:
            raise UnsupportedError(
                f"bands={bands}, frames={frames}, latent={latent}: each must be at least 1"
            )
        self.bands, self.frames = bands, frames
        self.frame_norm = nn.LayerNorm(bands)
        self.frame_encoder = nn.Linear(bands, bands)
        self.basis = nn.Parameter(torch.randn(latent, frames * bands))
        self.latent_norm = nn.LayerNorm(latent)
        self.latent_layer = nn.Linear(latent, latent)
        self.frame_decoder = nn.Linear(bands, bands)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Reconstruct x of [batch, frames * bands]."""
        self._check(x)
        split = x.view(-1, self.frames, self.bands)
        joined = F.gelu(self.frame_encoder(self.frame_norm(split))).flatten(1)
        basis = F.normalize(self.basis, dim=1)
        latent = F.gelu(self.latent_layer(self.latent_norm(joined @ basis.T)))
        decoded = (latent @ basis).view(-1, self.frames, self.bands)
        return self.frame_decoder(decoded).flatten(1)

    def anomaly_score(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean squared reconstruction error of each item."""
        return (self(x) - x).square().mean(1)

    def _check(self, x: torch.Tensor) -> None:
        if x.dim() != 2 or x.shape[1] != self.frames * self.bands:
            raise UnsupportedError(
                f"x has shape {tuple(x.shape)}; this network takes [batch, {self.frames * self.bands}], "
                f"{self.frames} frames of {self.bands} bands"
            )


class FusedSpectralAutoencoder(SpectralAutoencoder):
    """Spectral autoencoder that runs as one kernel forward and one backward (`escalade.ops.mlp`)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._chain(x, error=False)

    def anomaly_score(self, x: torch.Tensor) -> torch.Tensor:
        return self._chain(x, error=True)

    @property
    def layers(self) -> str:
        """The `layers` argument of the operator."""
        return _layers(self.bands, self.frames, len(self.basis), self.frame_norm.eps, self.latent_norm.eps)

    def _chain(self, x: torch.Tensor, error: bool) -> torch.Tensor:
        self._check(x)
        basis = F.normalize(self.basis, dim=1)
        frame_norm, encoder, decoder = self.frame_norm, self.frame_encoder, self.frame_decoder
        latent_norm, latent = self.latent_norm, self.latent_layer
        # By name, because `Module.parameters()` walks the module tree, which takes longer than a launch.
        parameters = (
            frame_norm.weight, frame_norm.bias, encoder.weight, encoder.bias, basis,
            latent_norm.weight, latent_norm.bias, latent.weight, latent.bias, basis.T,
            decoder.weight, decoder.bias,
        )  # fmt: skip
        return mlp(x, parameters, self.layers, error=error)


@lru_cache(maxsize=16)
def _layers(bands: int, frames: int, latent: int, frame_epsilon: float, latent_epsilon: float) -> str:
    return spelled(
        (
            Layer(bands, bands, frames, norm=True, activation="gelu", epsilon=frame_epsilon),
            Layer(frames * bands, latent, bias=False),
            Layer(latent, latent, norm=True, activation="gelu", epsilon=latent_epsilon),
            Layer(latent, frames * bands, bias=False),
            Layer(bands, bands, frames),
        )
    )
