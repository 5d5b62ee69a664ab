"""An autoencoder of spectrogram frames: one small network at every batch size, its anomaly score, its training."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from escalade import models
from escalade.bench.ladder import free
from escalade.bench.networks import parts, training
from escalade.bench.networks.measurement import Case, compare
from escalade.bench.networks.workload import Part, Say, Setting, Workload
from escalade.bench.peers import registry, torch_training
from escalade.bench.peers.network import Maker, Task
from escalade.engine.capture.export import capture
from escalade.engine.engine import Engine
from escalade.measure.records import Record

BANDS, FRAMES = 64, 5
_SCORE_BATCHES = (512, 1_048_576)
_TRAINING_BATCHES = (512, 65_536)
_LOUDEST, _QUIETEST, _SPREAD = 1.0, -3.0, (0.6, 1.4)
"""Logarithms of a band's power: the mean of the lowest and the highest band, and the deviations."""


def frames(count: int, size: int, seed: int, device: torch.device) -> torch.Tensor:
    """Rows like logarithmic mel spectra: [count, 5 frames x 64 bands], each band with its own level and spread.

    Made where they are wanted: a million rows take a CPU seconds.
    """
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(count, FRAMES, BANDS, generator=generator, device=device)
    level = torch.linspace(_LOUDEST, _QUIETEST, BANDS, device=device)
    spread = torch.linspace(*_SPREAD, BANDS, device=device)
    return x.mul_(spread).add_(level).view(count, size)


class Score(nn.Module):
    """The autoencoder, asked for anomaly scores instead of reconstructions."""

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


def _training(setting: Setting, say: Say) -> Iterator[list[Record]]:
    """Measures training; on the CPU the kernels run on the twin."""
    fused = models.FusedSpectralAutoencoder(BANDS, FRAMES)
    fused.load_state_dict(setting.model.state_dict())
    for batch in setting.among(_TRAINING_BATCHES):
        x = setting.inputs(batch, 5)
        expected = training.gradients(setting.model, x, _loss, setting.workload.chunk)
        peers = setting.peers_at(batch, registry.trainers(_loss))
        makers: dict[str, Maker] = {"escalade": torch_training.fused("escalade", fused, _loss), **peers}
        for dtype in setting.dtypes:
            task = Task(setting.model, x, dtype)
            standard = training.standard(setting.model, x, dtype, _loss, expected)
            case = Case(f"{setting.name}_training", task, standard, setting.seconds, setting.ceilings)
            yield compare(case, makers, say)
            free(setting.device)


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A sum, so that gradients of one row do not vanish in fp16; the rate of learning is divided instead."""
    assert isinstance(model, models.SpectralAutoencoder)
    return model.anomaly_score(x).float().sum()


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
        "training": Part(_training, usual_on_cpu=False, batches=_TRAINING_BATCHES),
    },
    small_batches=(32,),
    slow_batches=(32, 512, 65_536, 1_048_576),
    chunk=65_536,
    classifies=False,
)
