"""The encoder as others use it: features of images, and a linear classifier on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from escalade.engine import compile
from escalade.errors import UnsupportedError
from escalade.models import ConvAutoencoder
from escalade_apps.train.batches import Normalization, in_order
from escalade_apps.train.data.images import Dataset, Images

_EPOCHS, _LEAST_STEPS, _BATCH, _RATE, _DECAY = 10, 500, 512, 1e-2, 1e-5


class _Encoder(nn.Module):
    """The half of an autoencoder that makes features, a row an image."""

    def __init__(self, autoencoder: ConvAutoencoder) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.autoencoder.encode(x).flatten(1)


@dataclass(frozen=True)
class Judgement:
    """Accuracy of a linear classifier, on the images it was fitted to and on others."""

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
    """Encode images with an engine; return [images, features] in fp32, where the engine runs."""
    home = torch.device("cpu" if device == "twin" else device)
    batch = min(batch, len(images))
    engine = None
    rows = []
    for each in in_order(images, batch, home):
        taken = each.images(normalization)
        if engine is None:
            engine = compile(_Encoder(model).eval(), taken, dtype=dtype, device=device)
        rows.append(engine(taken).float())
    return torch.cat(rows)


class Probe:
    """A linear support-vector machine that learns the labels of images from their features."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        """Refuse a data set without labels before anything is trained for it."""
        if dataset.train.labels is None or dataset.test.labels is None:
            raise UnsupportedError(f"{dataset.name} has no labels for a classifier to learn")
        self._parts = (dataset.train, dataset.train.labels), (dataset.test, dataset.test.labels)
        self._seed = seed

    def fit(
        self, model: ConvAutoencoder, normalization: Normalization, *, batch: int, dtype: str, device: str
    ) -> Judgement:
        """Fit the classifier to the features that this model's encoder makes, and judge it."""
        (train, answers), (test, others) = (
            (features(model, images, normalization, batch=batch, dtype=dtype, device=device), labels)
            for images, labels in self._parts
        )
        mean, scale = train.mean(0), train.std(0).clamp_min(1e-6)
        for rows in (train, test):
            rows.sub_(mean).div_(scale)
        machine = _support_vector_machine(train, answers.to(train.device), self._seed)
        right = [
            float((machine(rows).argmax(1) == labels.to(rows.device)).float().mean())
            for rows, labels in ((train, answers), (test, others))
        ]
        return Judgement(train.shape[1], *right)


def _support_vector_machine(
    rows: torch.Tensor, labels: torch.Tensor, seed: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Fit one hyperplane per class by the hinge loss, averaged over the second half of the steps."""
    generator = torch.Generator().manual_seed(seed)
    classes = int(labels.max()) + 1
    weight = torch.zeros(classes, rows.shape[1], device=rows.device, requires_grad=True)
    bias = torch.zeros(classes, device=rows.device, requires_grad=True)
    optimizer = torch.optim.Adam([weight, bias], _RATE, weight_decay=_DECAY)
    kept: list[torch.Tensor] = [torch.zeros_like(weight), torch.zeros_like(bias)]
    steps = max(_LEAST_STEPS, _EPOCHS * len(rows) // _BATCH)
    with torch.enable_grad():
        for step in range(steps):
            here = torch.randint(len(rows), (_BATCH,), generator=generator).to(rows.device)
            optimizer.zero_grad()
            F.multi_margin_loss(F.linear(rows[here], weight, bias), labels[here]).backward()
            optimizer.step()
            if step >= steps // 2:
                for mean, one in zip(kept, (weight, bias), strict=True):
                    mean.add_(one.detach() / (steps - steps // 2))
    return lambda given: F.linear(given, *kept)
