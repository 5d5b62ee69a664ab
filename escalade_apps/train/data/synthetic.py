"""Images that are made up: smooth patterns, a kind for each class, moved about, in other lights and with noise."""

from __future__ import annotations

import torch

from escalade.device import host_memory
from escalade_apps.train.augmentation import Moves, moved
from escalade_apps.train.data.images import Images
from escalade_apps.train.randomness import generator

CLASSES = 10
_COARSE = 4
"""Rows and columns of the random numbers that a pattern is drawn through."""
_CHUNK = 2048
_NOISE = 6.0
"""The standard deviation of the noise, in steps of a byte."""
_GRAINS = 251
"""How many images of noise there are, each laid over many images: one of its own for each takes the most time."""


def make(count: int, side: int, seed: int, purpose: str) -> Images:
    """A number of images of one seed, the same on every machine, in equal parts of each class.

    What is to be learned from them: a pattern needs few numbers (an autoencoder can keep them), and its kind tells the
    class wherever it lies (a classifier can find it).
    """
    grain = _GRAINS * side * side * 3 * torch.float32.itemsize
    host_memory.require(
        count * (side * side * 3 + torch.int64.itemsize) + grain, f"{count:,} images of {side} x {side}"
    )
    random = generator(seed, "patterns")
    coarse = torch.randn(CLASSES, 3, _COARSE, _COARSE, generator=random)
    patterns = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bicubic", align_corners=True)
    patterns = (patterns * 40 + 128).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()

    random = generator(seed, "images", purpose)
    grains = torch.randn(_GRAINS, side, side, 3, generator=random) * _NOISE
    labels = torch.randperm(count, generator=random) % CLASSES
    pixels = torch.empty(count, side, side, 3, dtype=torch.uint8)
    for start in range(0, count, _CHUNK):
        chosen = labels[start : start + _CHUNK]
        size = len(chosen)
        flips = torch.randint(2, (size,), generator=random)
        shifts = torch.randint(-(side // 4), side // 4 + 1, (size, 2), generator=random)
        light = torch.rand(size, 1, 1, 3, generator=random) * 0.5 + 0.6
        noise = grains[torch.randint(_GRAINS, (size,), generator=random)]
        images = moved(patterns[chosen], Moves(flips, shifts))
        pixels[start : start + _CHUNK] = noise.addcmul_(images, light).clamp_(0, 255).to(torch.uint8)
    return Images(pixels, labels, CLASSES)
