"""Inputs of the measured networks: random images and spectra, and real data and weights if they are installed."""

from __future__ import annotations

import itertools
import os
import pathlib
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F

from escalade.errors import UnsupportedError
from escalade.terminal_text import counted
from escalade_apps.train.data.arrays import read_idx

_FOLDERS = ("data", "../shared/data")
_PACKAGED = pathlib.Path("/usr/share/datasets/fashion-mnist")
"""Folder of Debian's package dataset-fashion-mnist."""
CLOTHES_SIDE, COUNT = 86, 10_000
"""Fashion-MNIST's test images: side after resizing, and number."""
WEIGHTS = "lenet_weights-86.bin"
"""Weights of a LeNet trained on Fashion-MNIST."""
IMAGES, LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
_SIDE = 28
BANDS, FRAMES = 64, 5
_LOUDEST, _QUIETEST, _SPREAD = 1.0, -3.0, (0.6, 1.4)
"""Logarithms of power: means of the lowest and the highest band, and standard deviations."""


def folders() -> tuple[pathlib.Path, ...]:
    """Return the folders that are searched: `ESCALADE_DATA`, or the usual ones, and Debian's."""
    given = os.environ.get("ESCALADE_DATA")
    return (*(pathlib.Path(name) for name in ((given,) if given else _FOLDERS)), _PACKAGED)


def find(name: str) -> pathlib.Path | None:
    """Return the file or folder of that name, compressed or not; None if it is not installed."""
    paths = (folder / file for folder in folders() for file in (name, f"{name}.gz"))
    return next((path for path in paths if path.exists()), None)


def missing(*names: str) -> str:
    """Return which of these names are not installed, and where they were searched; empty if all are."""
    absent = ", ".join(name for name in names if find(name) is None)
    return f"{absent} (or .gz): in none of {', '.join(map(str, folders()))}" if absent else ""


@dataclass(frozen=True)
class Clothes:
    images: torch.Tensor
    """The images, [count, 1, 86, 86], uint8."""
    labels: torch.Tensor


def clothes(count: int = COUNT) -> Clothes | None:
    """Return Fashion-MNIST's first test images, resized; None if they are not installed."""
    images, labels = find(IMAGES), find(LABELS)
    return None if images is None or labels is None else _read(images, labels, count)


@cache
def _read(images: pathlib.Path, labels: pathlib.Path, count: int) -> Clothes:
    from PIL import Image

    found = read_idx(images, labels)
    if len(found) < count or found.pixels.shape[1:] != (_SIDE, _SIDE, 1):
        raise UnsupportedError(
            f"{images} is not the whole of Fashion-MNIST's {IMAGES}: it has {counted(len(found), 'image')} of "
            f"{tuple(found.pixels.shape[1:3])}, and {count:,} of {(_SIDE, _SIDE)} are needed"
        )
    assert found.labels is not None
    small = (Image.fromarray(image) for image in found.pixels[:count, :, :, 0].numpy())
    large = [np.asarray(one.resize((CLOTHES_SIDE, CLOTHES_SIDE), Image.Resampling.BILINEAR)) for one in small]
    return Clothes(torch.from_numpy(np.stack(large))[:, None], found.labels[:count])


def grey(count: int, size: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return Fashion-MNIST's images, repeated if there are too few; random gray values without them."""
    found = clothes(min(count, COUNT))
    if found is None:
        generator = torch.Generator(device).manual_seed(seed)
        return torch.randint(0, 256, (count, 1, size, size), generator=generator, device=device).float()
    return found.images[torch.arange(count) % len(found.images)].to(device).float()


def images(count: int, size: int = 224, seed: int = 0, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return normalized images [count, 3, size, size]: blotches of several sizes, each with its own color and contrast.

    White noise is unsuitable: a network does not distinguish samples of it.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    x = noise(count, 3, 1, 1).expand(count, 3, size, size)
    for cells in itertools.takewhile(lambda cells: cells <= size // 2, (2, 5, 14, 40, 112)):
        blotches = F.interpolate(noise(count, 3, cells, cells), (size, size), mode="bilinear")
        x = x + noise(count, 1, 1, 1) * blotches
    return (0.5 * x + 0.1 * noise(count, 3, size, size)).to(device)


def frames(count: int, size: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return rows like logarithmic mel spectra: [count, 5 frames x 64 bands], each band with its own level and spread.

    They are generated on the device: a million rows take seconds on a CPU.
    """
    x = noise((FRAMES, BANDS), count, seed, device)
    level = torch.linspace(_LOUDEST, _QUIETEST, BANDS, device=device)
    return x.mul_(torch.linspace(*_SPREAD, BANDS, device=device)).add_(level).view(count, size)


def noise(item: tuple[int, ...], count: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return random numbers of any shape, made on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(count, *item, generator=generator, device=device)


def normalised(images: torch.Tensor, normalize: tuple[tuple[float, ...], tuple[float, ...]]) -> torch.Tensor:
    """Return bytes normalized by means and deviations in fp32, as a compiled engine does."""
    mean, deviation = (
        torch.tensor(values, dtype=torch.float64, device=images.device).view(-1, 1, 1) for values in normalize
    )
    return ((images.double() / 255 - mean) / deviation).float()
