"""Autoencoder of spectrogram frames, for anomaly detection in machine sounds by reconstruction error."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import nn

from escalade.errors import UnsupportedError
from escalade.ops.mlp import Layer, mlp
from escalade.ops.mlp.problem import spelled


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
