"""The encoder's features, and a linear classifier trained on them."""

from __future__ import annotations

import pytest
import torch

from escalade.errors import UnsupportedError
from escalade.models import ConvAutoencoder
from escalade_apps.train.batches import Normalization
from escalade_apps.train.data import Dataset, Images
from escalade_apps.train.data.synthetic import make
from escalade_apps.train.probing import Probe, features


def test_features_are_the_encoders_image_by_image() -> None:
    model, images = ConvAutoencoder(4), make(5, 8, 0, "test")
    found = features(model, images, Normalization(), batch=2, dtype="fp32", device="cpu")
    with torch.no_grad():
        expected = model.encode(images.pixels.permute(0, 3, 1, 2) / 255).flatten(1)
    torch.testing.assert_close(found, expected)


def test_a_linear_classifier_learns_from_features() -> None:
    torch.manual_seed(0)
    dataset = Dataset("synthetic", make(200, 8, 0, "train"), make(50, 8, 0, "test"))
    found = Probe(dataset, 0).fit(ConvAutoencoder(16), Normalization(), batch=50, dtype="fp32", device="cpu")
    assert found.features == 32 and found.train > 0.5 and found.test > 0.3  # one in ten is right by chance


def test_images_without_labels_are_refused_before_training() -> None:
    unlabelled = Images(torch.zeros(4, 8, 8, 3, dtype=torch.uint8), None)
    with pytest.raises(UnsupportedError, match="has no labels"):
        Probe(Dataset("photographs", unlabelled, unlabelled), 0)
