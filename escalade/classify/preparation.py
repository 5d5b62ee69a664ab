"""What a ResNet wants of image files: which crop, which normalisation, and an engine that takes their bytes."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from escalade.classify.images import Crop
from escalade.classify.prediction import example, first_images
from escalade.engine import Engine, compile
from escalade.models import ResNet

Colour = tuple[float, float, float]
Normalization = tuple[Colour, Colour]
_PHOTOGRAPHS, _SMALL_IMAGES = Crop(256, 224), Crop(32, 32)
"""The crops for ImageNet's stem and for CIFAR's."""
_IMAGENET: Normalization = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_PLAIN: Normalization = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


def crop_of(model: ResNet) -> Crop:
    return _SMALL_IMAGES if model.small_images else _PHOTOGRAPHS


def normalization(model: ResNet, mean: Colour | None = None, std: Colour | None = None) -> Normalization:
    """What was given, else ImageNet's; none for small images, whose networks differ in it."""
    usual_mean, usual_std = _PLAIN if model.small_images else _IMAGENET
    return mean or usual_mean, std or usual_std


def compiled(
    model: ResNet,
    dtype: str,
    device: str,
    batch: int,
    normalize: Normalization,
    files: Sequence[pathlib.Path],
) -> Engine:
    """An engine for batches of bytes; FP8's ranges are those of the first of the files."""
    crop = crop_of(model)
    return compile(
        model,
        example(batch, crop),
        dtype=dtype,
        device=device,
        normalize=normalize,
        calibration=first_images(files, crop, batch) if dtype == "fp8" else None,
    )
