"""Fashion-MNIST's test images and the weights of a LeNet trained on it, if they are installed."""

from __future__ import annotations

import gzip
import pathlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from escalade.errors import UnsupportedError
from escalade_bench.networks import at_hand

SIZE = 86
"""Side of the resized images."""
COUNT = 10_000
WEIGHTS = "lenet_weights-86.bin"
IMAGES, LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
_PACKAGED = pathlib.Path("/usr/share/datasets/fashion-mnist")
"""Folder of Debian's package dataset-fashion-mnist."""
_SIDE = 28
_HEADERS = {IMAGES: 16, LABELS: 8}
"""Bytes of a magic number and the size of every dimension."""
_MAGIC = {IMAGES: 2051, LABELS: 2049}


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
    small = _contents(images, IMAGES, count * _SIDE * _SIDE).reshape(count, _SIDE, _SIDE)
    classes = _contents(labels, LABELS, count).astype(np.int64)
    return Clothes(torch.from_numpy(_resized(small))[:, None], torch.from_numpy(classes))


def _contents(path: pathlib.Path, name: str, size: int) -> np.ndarray:
    """Return `size` bytes behind the header of an IDX file."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header, data = file.read(_HEADERS[name]), file.read(size)
    except (OSError, EOFError) as error:
        raise UnsupportedError(f"{path} cannot be read: {error}") from error
    if int.from_bytes(header[:4], "big") != _MAGIC[name] or len(data) != size:
        raise UnsupportedError(f"{path} is not Fashion-MNIST's {name}, or not the whole of it")
    return np.frombuffer(data, np.uint8)


def _resized(images: Sequence[np.ndarray] | np.ndarray) -> np.ndarray:
    from PIL import Image

    large = [Image.fromarray(image).resize((SIZE, SIZE), Image.Resampling.BILINEAR) for image in images]
    return np.stack([np.asarray(image) for image in large])
