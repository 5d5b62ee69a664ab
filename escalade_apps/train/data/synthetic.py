"""Synthetic images: one smooth pattern per class, randomly flipped, shifted, colored and with noise."""

from __future__ import annotations

import torch

from escalade.device import host_memory
from escalade_apps.train.augmentation import Moves, generator, moved
from escalade_apps.train.data.images import Images

CLASSES = 10
_COARSE = 4
"""Rows and columns of the random grid that a pattern interpolates."""
_CHUNK = 2048
_NOISE = 6.0
"""Standard deviation of the noise, of 255."""
_NOISE_IMAGES = 251
"""Noise images, each used for many images: drawing one per image would take most of the time."""


def make(count: int, side: int, seed: int, purpose: str) -> Images:
    """Return `count` images with balanced classes, the same on every machine for the same seed.

    A pattern has few degrees of freedom, so that an autoencoder can learn it, and identifies its class at any position,
    so that a classifier can.
    """
    noise_bytes = _NOISE_IMAGES * side * side * 3 * torch.float32.itemsize
    host_memory.require(
        count * (side * side * 3 + torch.int64.itemsize) + noise_bytes, f"{count:,} images of {side} x {side}"
    )
    random = generator(seed, "patterns")
    coarse = torch.randn(CLASSES, 3, _COARSE, _COARSE, generator=random)
    patterns = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bicubic", align_corners=True)
    patterns = (patterns * 40 + 128).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()

    random = generator(seed, "images", purpose)
    noises = torch.randn(_NOISE_IMAGES, side, side, 3, generator=random) * _NOISE
    labels = torch.randperm(count, generator=random) % CLASSES
    pixels = torch.empty(count, side, side, 3, dtype=torch.uint8)
    for start in range(0, count, _CHUNK):
        chosen = labels[start : start + _CHUNK]
        size = len(chosen)
        flips = torch.randint(2, (size,), generator=random)
        shifts = torch.randint(-(side // 4), side // 4 + 1, (size, 2), generator=random)
        light = torch.rand(size, 1, 1, 3, generator=random) * 0.5 + 0.6
        noise = noises[torch.randint(_NOISE_IMAGES, (size,), generator=random)]
        images = moved(patterns[chosen], Moves(flips, shifts))
        pixels[start : start + _CHUNK] = noise.addcmul_(images, light).clamp_(0, 255).to(torch.uint8)
    return Images(pixels, labels, CLASSES)
