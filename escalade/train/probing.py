"""The encoder as others use it: features of images, and a linear classifier on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from escalade.engine import compile
from escalade.errors import UnsupportedError
from escalade.models import ConvAutoencoder
from escalade.train.batches import Normalization, in_order
from escalade.train.data.images import Dataset, Images


class _Encoder(nn.Module):
    """The half of an autoencoder that makes features, a row an image."""

    def __init__(self, autoencoder: ConvAutoencoder) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.autoencoder.encode(x).flatten(1)


@dataclass(frozen=True)
class Judgement:
    """How often a linear classifier is right, on the images it was fitted to and on others."""

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
) -> np.ndarray:
    """What the encoder makes of images, [images, features], by an engine of Escalade's."""
    home = torch.device("cpu" if device == "twin" else device)
    batch = min(batch, len(images))
    engine = None
    rows = []
    for each in in_order(images, batch, home):
        taken = each.images(normalization)
        if engine is None:
            engine = compile(_Encoder(model).eval(), taken, dtype=dtype, device=device)
        rows.append(engine(taken).float().cpu())
    return torch.cat(rows).numpy()


class Probe:
    """A linear support-vector machine that learns the labels of images from their features."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        """Refuses what will not work, before anything is trained for it."""
        if dataset.train.labels is None or dataset.test.labels is None:
            raise UnsupportedError(f"{dataset.name} has no labels for a classifier to learn")
        self._parts = (dataset.train, dataset.train.labels), (dataset.test, dataset.test.labels)
        self._machine = _classifier(seed)

    def fit(
        self, model: ConvAutoencoder, normalization: Normalization, *, batch: int, dtype: str, device: str
    ) -> Judgement:
        """How often it is right with the features that this model's encoder makes."""
        train, test = (
            (features(model, images, normalization, batch=batch, dtype=dtype, device=device), labels.numpy())
            for images, labels in self._parts
        )
        self._machine.fit(*train)
        return Judgement(
            train[0].shape[1], float(self._machine.score(*train)), float(self._machine.score(*test))
        )


def _classifier(seed: int) -> Any:
    try:
        from sklearn.linear_model import SGDClassifier
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler
    except ImportError as error:
        raise UnsupportedError(
            "a classifier on the encoder's features needs scikit-learn: pip install 'escalade[train]'"
        ) from error
    return make_pipeline(StandardScaler(), SGDClassifier("hinge", average=True, random_state=seed))
