"""Autoencoder of spectrogram frames: one small network at every batch size, its anomaly score, its training."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from escalade import models
from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade_bench.measure.records import Record
from escalade_bench.networks import parts, training_step
from escalade_bench.networks.training_step import Training
from escalade_bench.networks.workload import Part, Say, Setting, Workload
from escalade_bench.peers import registry

BANDS, FRAMES = 64, 5
_SCORE_BATCHES = (512, 1_048_576)
_LOUDEST, _QUIETEST, _SPREAD = 1.0, -3.0, (0.6, 1.4)
"""Logarithms of power: means of the lowest and the highest band, and standard deviations."""


def frames(count: int, size: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return rows like logarithmic mel spectra: [count, 5 frames x 64 bands], each band with its own level and spread.

    They are generated on the device: a million rows take seconds on a CPU.
    """
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(count, FRAMES, BANDS, generator=generator, device=device)
    level = torch.linspace(_LOUDEST, _QUIETEST, BANDS, device=device)
    spread = torch.linspace(*_SPREAD, BANDS, device=device)
    return x.mul_(spread).add_(level).view(count, size)


class Score(nn.Module):
    """The autoencoder with anomaly scores as results."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        assert isinstance(model, models.SpectralAutoencoder)
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.anomaly_score(x)


def _score(setting: Setting, say: Say) -> Iterator[list[Record]]:
    model = Score(setting.model).eval()
    graph = capture(model, (setting.inputs(2, 0).cpu(),))
    engines = {dtype: Engine(graph, dtype, setting.device, plans=1) for dtype in setting.dtypes}
    sizes = setting.among(_SCORE_BATCHES)
    yield from parts.over_batches(setting, f"{setting.name}_score", model, engines, sizes, say)


def fused(model: nn.Module) -> nn.Module:
    """Return the same network and parameters with all layers as one operator, which has kernels for its gradients."""
    assert isinstance(model, models.SpectralAutoencoder)
    made = models.FusedSpectralAutoencoder(model.bands, model.frames, len(model.basis))
    made.load_state_dict(model.state_dict())
    return made.to(model.basis.device).train(model.training)


_TRAINING = Training(
    F.mse_loss, lambda x, seed: x, (32, 64, 128, 256, 512, 65_536, 1_048_576), scale=2.0**16, rate=1e-2, ours=fused
)  # fmt: skip


SPECTRAL = Workload(
    "spectral_autoencoder",
    lambda size, seed: models.SpectralAutoencoder(BANDS, FRAMES),
    frames,
    FRAMES * BANDS,
    batches=(32, 64, 128, 256, 512, 4_096, 65_536, 1_048_576),
    dtypes=("fp32", "fp16"),
    peers=registry.plain("flat"),
    parts={
        "accuracy": Part(parts.accuracy),
        "batches": Part(parts.batches),
        "score": Part(_score, batches=_SCORE_BATCHES),
        "training-step": training_step.part(_TRAINING),
    },
    small_batches=(32,),
    slow_batches=(32, 512, 65_536, 1_048_576),
    chunk=65_536,
    classifies=False,
)
