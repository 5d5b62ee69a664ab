"""Evaluate an encoder with a linear classifier on its features."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from escalade.engine import compile
from escalade.errors import UnsupportedError
from escalade.models import ConvAutoencoder
from escalade_apps.train.batches import Normalization, sequential_batches
from escalade_apps.train.data.images import Dataset, Images

_EPOCHS, _MIN_STEPS, _BATCH, _RATE, _DECAY = 10, 500, 512, 1e-2, 1e-5


class _Encoder(nn.Module):
    """Encoder half of an autoencoder, with flattened features."""

    def __init__(self, autoencoder: ConvAutoencoder) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.autoencoder.encode(x).flatten(1)


@dataclass(frozen=True)
class ProbeResult:
    """Number of features, and accuracy of the linear classifier on training and test images."""

    features: int
    train: float
    test: float


def features(
    model: ConvAutoencoder,
    images: Images,
    normalization: Normalization,
    *,
    batch: int,
    dtype: str,
    device: str,
) -> torch.Tensor:
    """Encode images with an engine. Return fp32, [images, features], on the engine's device."""
    home = torch.device("cpu" if device == "twin" else device)
    batch = min(batch, len(images))
    engine = None
    rows = []
    for each in sequential_batches(images, batch, home):
        x = each.images(normalization)
        if engine is None:
            engine = compile(_Encoder(model).eval(), x, dtype=dtype, device=device)
        rows.append(engine(x).float())
    return torch.cat(rows)


class Probe:
    """Linear support-vector machine from features to labels."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        if dataset.train.labels is None or dataset.test.labels is None:
            raise UnsupportedError(f"{dataset.name} has no labels for a classifier to learn")
        self._parts = (dataset.train, dataset.train.labels), (dataset.test, dataset.test.labels)
        self._seed = seed

    def fit(
        self, model: ConvAutoencoder, normalization: Normalization, *, batch: int, dtype: str, device: str
    ) -> ProbeResult:
        """Fit the classifier to the features of this model's encoder, and evaluate it."""
        (train, train_labels), (test, test_labels) = (
            (features(model, images, normalization, batch=batch, dtype=dtype, device=device), labels)
            for images, labels in self._parts
        )
        mean, scale = train.mean(0), train.std(0).clamp_min(1e-6)
        for rows in (train, test):
            rows.sub_(mean).div_(scale)
        machine = _support_vector_machine(train, train_labels.to(train.device), self._seed)
        accuracies = [
            float((machine(rows).argmax(1) == labels.to(rows.device)).float().mean())
            for rows, labels in ((train, train_labels), (test, test_labels))
        ]
        return ProbeResult(train.shape[1], *accuracies)


def _support_vector_machine(
    rows: torch.Tensor, labels: torch.Tensor, seed: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Fit one hyperplane per class with the hinge loss. Averages the weights over the second half of the steps."""
    generator = torch.Generator().manual_seed(seed)
    classes = int(labels.max()) + 1
    weight = torch.zeros(classes, rows.shape[1], device=rows.device, requires_grad=True)
    bias = torch.zeros(classes, device=rows.device, requires_grad=True)
    optimizer = torch.optim.Adam([weight, bias], _RATE, weight_decay=_DECAY)
    averages: list[torch.Tensor] = [torch.zeros_like(weight), torch.zeros_like(bias)]
    steps = max(_MIN_STEPS, _EPOCHS * len(rows) // _BATCH)
    with torch.enable_grad():
        for step in range(steps):
            indices = torch.randint(len(rows), (_BATCH,), generator=generator).to(rows.device)
            optimizer.zero_grad()
            F.multi_margin_loss(F.linear(rows[indices], weight, bias), labels[indices]).backward()
            optimizer.step()
            if step >= steps // 2:
                for average, parameter in zip(averages, (weight, bias), strict=True):
                    average.add_(parameter.detach() / (steps - steps // 2))
    return lambda features: F.linear(features, *averages)
