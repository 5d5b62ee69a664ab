"""Fashion-MNIST's test images and the weights of a LeNet trained on it, if they are installed."""

from __future__ import annotations

import pathlib
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from escalade.errors import UnsupportedError
from escalade.terminal_text import counted
from escalade_apps.train.data.arrays import read_idx
from escalade_bench.networks import at_hand

SIZE = 86
"""Side of the resized images."""
COUNT = 10_000
WEIGHTS = "lenet_weights-86.bin"
IMAGES, LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
_PACKAGED = pathlib.Path("/usr/share/datasets/fashion-mnist")
"""Folder of Debian's package dataset-fashion-mnist."""
_SIDE = 28


def folders() -> tuple[pathlib.Path, ...]:
    """Return the folders that are searched."""
    return (*at_hand.folders(), _PACKAGED)


def find(name: str) -> pathlib.Path | None:
    """Return the file, compressed or not."""
    paths = (folder / file for folder in folders() for file in (name, f"{name}.gz"))
    return next((path for path in paths if path.is_file()), None)


def missing() -> tuple[str, ...]:
    return tuple(name for name in (WEIGHTS, IMAGES, LABELS) if find(name) is None)


@dataclass(frozen=True)
class Clothes:
    images: torch.Tensor
    """The images, [count, 1, 86, 86], uint8."""
    labels: torch.Tensor


def clothes(count: int = COUNT) -> Clothes | None:
    """Return the first test images, resized; None if they are not installed."""
    images, labels = find(IMAGES), find(LABELS)
    return None if images is None or labels is None else _read(images, labels, count)


@cache
def _read(images: pathlib.Path, labels: pathlib.Path, count: int) -> Clothes:
    found = read_idx(images, labels)
    if len(found) < count or found.pixels.shape[1:] != (_SIDE, _SIDE, 1):
        raise UnsupportedError(
            f"{images} is not the whole of Fashion-MNIST's {IMAGES}: it has {counted(len(found), 'image')} of "
            f"{tuple(found.pixels.shape[1:3])}, and {count:,} of {(_SIDE, _SIDE)} are needed"
        )
    small = found.pixels[:count, :, :, 0].numpy()
    assert found.labels is not None
    return Clothes(torch.from_numpy(_resized(small))[:, None], found.labels[:count])


def _resized(images: np.ndarray) -> np.ndarray:
    from PIL import Image

    large = [Image.fromarray(image).resize((SIZE, SIZE), Image.Resampling.BILINEAR) for image in images]
    return np.stack([np.asarray(image) for image in large])
