"""Images in memory, split into training and test images."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch

from escalade.errors import UnsupportedError
from escalade.terminal_text import counted
from escalade_apps.train.augmentation import generator


@dataclass(frozen=True)
class Images:
    """Images of one size, with optional labels."""

    pixels: torch.Tensor
    """uint8, [count, rows, columns, channels], with one channel (gray) or three (RGB)."""
    labels: torch.Tensor | None
    """int64, [count]; None if the images are not labeled."""
    classes: int = 0

    def __len__(self) -> int:
        return len(self.pixels)

    def select(self, indices: torch.Tensor) -> Images:
        labels = None if self.labels is None else self.labels[indices]
        return Images(self.pixels[indices], labels, self.classes)

    def checksum(self) -> int:
        """Return a checksum of pixels and labels in order."""
        checksum = zlib.crc32(repr(tuple(self.pixels.shape)).encode())
        for part in (self.pixels, self.labels):
            if part is not None:
                checksum = zlib.crc32(part.contiguous().view(torch.uint8).numpy().data, checksum)
        return checksum


@dataclass(frozen=True)
class Dataset:
    """Training and test images of one size."""

    name: str
    train: Images
    test: Images

    def __post_init__(self) -> None:
        sizes = [tuple(part.pixels.shape[1:]) for part in (self.train, self.test)]
        if sizes[0] != sizes[1]:
            raise UnsupportedError(
                f"{self.name} has training images of {sizes[0]} and test images of {sizes[1]}; the sizes must be equal"
            )
        if self.test.classes > self.train.classes:
            raise UnsupportedError(
                f"{self.name} has {self.test.classes} classes in its test images and only {self.train.classes} in its "
                "training images"
            )


def split(name: str, images: Images, held_out: float, seed: int) -> Dataset:
    """Hold out a random fraction of the images for testing. With 0, the training images are also the test images."""
    if not 0 <= held_out < 1:
        raise UnsupportedError(f"--held-out {held_out}: must be a fraction from 0 to less than 1")
    if held_out == 0:
        return Dataset(name, images, images)
    tests = max(1, round(len(images) * held_out))
    if tests >= len(images):
        raise UnsupportedError(
            f"{name} has {counted(len(images), 'image')}, too few to hold out {held_out:.0%} of them"
        )
    shuffled = torch.randperm(len(images), generator=generator(seed, "held out"))
    train, test = shuffled[tests:].sort().values, shuffled[:tests].sort().values
    return Dataset(name, images.select(train), images.select(test))
