"""Photographs resized on a device, compared with Pillow's results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import PIL
import torch
from PIL import Image

from escalade.device.run import TwinOptions
from escalade_apps.classify.images import Crop, pixels
from escalade_apps.classify.resizing import resize

_POISON = 171
_MOST_OFF = 1 if PIL.__version__.startswith(("12.2.", "12.3.")) else 0
"""These versions round some bytes of very high photographs differently from earlier and later ones."""


def difference(
    sizes: Sequence[tuple[int, int]],
    crop: Crop,
    device: torch.device,
    seed: int,
    options: TwinOptions = TwinOptions(),
) -> str:
    """Return errors for photographs of these widths and heights, all resized at once; empty if none.

    Every second square is unused and must not change; the last photographs use the first squares.
    """
    random = np.random.default_rng(seed)
    images = [random.integers(0, 256, (height, width, 3)).astype(np.uint8) for width, height in sizes]
    numbers = range(2 * len(images) - 1, 0, -2)
    squares = torch.full((2 * len(images), crop.side, crop.side, 3), _POISON, dtype=torch.uint8).to(device)
    photographs = {
        number: torch.from_numpy(image).permute(2, 0, 1).contiguous().to(device)
        for number, image in zip(numbers, images, strict=True)
    }
    resize(photographs, crop, squares, options)
    found = squares.cpu().numpy()
    for number, image, size in zip(numbers, images, sizes, strict=True):
        expected = pixels(Image.fromarray(image), crop)
        off = np.abs(found[number].astype(int) - expected)
        if (off > _MOST_OFF).any():
            return (
                f"{crop}, {size}: {np.count_nonzero(off)} of {off.size} bytes are off, by up to {off.max()}"
            )
    return "" if (found[::2] == _POISON).all() else "a square was written that is no photograph's"
