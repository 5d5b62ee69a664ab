"""Images in memory, and which of them are trained on."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from escalade.errors import UnsupportedError
from escalade_apps.train.randomness import generator


@dataclass(frozen=True)
class Images:
    """Images of one size, and what is on them."""

    pixels: torch.Tensor
    """uint8, [count, rows, columns, channels]: one channel is grey, three are red, green and blue."""
    labels: torch.Tensor | None
    """int64, [count]; None where nobody has said what is on them."""
    classes: int = 0
    """How many kinds the labels tell apart."""

    def __len__(self) -> int:
        return len(self.pixels)

    def some(self, indices: torch.Tensor) -> Images:
        labels = None if self.labels is None else self.labels[indices]
        return Images(self.pixels[indices], labels, self.classes)

    def checksum(self) -> int:
        """Other images, labels or another order give another number."""
        found = zlib.crc32(repr(tuple(self.pixels.shape)).encode())
        for part in (self.pixels, self.labels):
            if part is not None:
                found = zlib.crc32(part.contiguous().view(torch.uint8).numpy().data, found)
        return found


@dataclass(frozen=True)
class Dataset:
    """What is trained on, and what it is judged by."""

    name: str
    train: Images
    test: Images

    def __post_init__(self) -> None:
        sizes = [tuple(part.pixels.shape[1:]) for part in (self.train, self.test)]
        if sizes[0] != sizes[1]:
            raise UnsupportedError(
                f"{self.name} has images of {sizes[0]} to train on and of {sizes[1]} to test by; they must be alike"
            )
        if self.test.classes > self.train.classes:
            raise UnsupportedError(
                f"{self.name} has {self.test.classes} classes to test by and {self.train.classes} to train on"
            )


def divided(name: str, images: Images, held_out: float, seed: int) -> Dataset:
    """A dataset of images that come without a part to test by: a fraction of them is held out, drawn by the seed.

    With a fraction of 0 the images that are trained on are the test as well.
    """
    if not 0 <= held_out < 1:
        raise UnsupportedError(f"{held_out} of the images held out: it is a fraction, from 0 to less than 1")
    if held_out == 0:
        return Dataset(name, images, images)
    tests = max(1, round(len(images) * held_out))
    if tests >= len(images):
        raise UnsupportedError(f"{name} has {len(images)} images, too few to hold {held_out:.0%} of them out")
    drawn = torch.randperm(len(images), generator=generator(seed, "held out"))
    return Dataset(name, images.some(drawn[tests:].sort().values), images.some(drawn[:tests].sort().values))
