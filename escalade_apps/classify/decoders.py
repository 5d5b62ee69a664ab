"""Choose the decoder for an engine: nvJPEG on a GPU where torchvision provides it, otherwise Pillow.

Files that nvJPEG does not support are decoded by Pillow, whose pixels are the reference. nvJPEG's differ by rounding,
and at color edges by how the subsampled chroma planes are upsampled. Nothing else differs: `resizing` is bit-exact with
Pillow. A GPU test bounds the mean difference over an image by `MAX_MEAN_DIFFERENCE`. torchvision's CPU decoder uses
libjpeg-turbo like Pillow's, and was no faster on the one processor (aarch64) it was tried on.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Protocol

import numpy as np
import PIL
import torch

from escalade_apps.classify.batch import Batch
from escalade_apps.classify.images import Crop, Source, Unreadable
from escalade_apps.classify.nvjpeg import NvJpeg
from escalade_apps.classify.reading import decode_all

MAX_MEAN_DIFFERENCE = 1.5
"""Bound on the mean absolute difference to Pillow, of 255. Measured on an H200 over photographs: 0.41, at most 0.44,
and 0.16 without chroma subsampling. The test's steeper color edges add up to 0.96, because nvJPEG repeats chroma values
where Pillow interpolates. These figures date from when PyTorch resized, which rounds once where Pillow rounds twice."""


class Decoder(Protocol):
    """Turns files into batches."""

    name: str
    """Name used in output and records."""

    def batches(self, files: Sequence[Source], crop: Crop, batch: int) -> Generator[Batch, None, None]:
        """Yield batches in the order of the files, all of size `batch` so that the engine needs one plan.

        The last batch is padded. It has no files if only unreadable ones were left.
        """


class Pillow:
    """Decodes into host memory, pinned for an engine on a GPU so that it need not be staged again."""

    name = f"Pillow {PIL.__version__}"

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned

    def batches(self, files: Sequence[Source], crop: Crop, batch: int) -> Generator[Batch, None, None]:
        images, rows = self._allocate(crop, batch)
        names: list[Source] = []
        skipped: list[Unreadable] = []
        with closing(decode_all(files, crop, ahead=2 * batch)) as decoded:
            for image in decoded:
                if isinstance(image, Unreadable):
                    skipped.append(image)
                    continue
                rows[len(names)] = image.pixels
                names.append(image.file)
                if len(names) == batch:
                    yield Batch(names, images, skipped)
                    names, skipped = [], []
                    images, rows = self._allocate(crop, batch)
        if names or skipped:
            rows[len(names) :] = 0
            yield Batch(names, images, skipped)

    def _allocate(self, crop: Crop, batch: int) -> tuple[torch.Tensor, np.ndarray]:
        # New memory for every batch: the previous one may still be in flight to the GPU.
        images = torch.empty(batch, crop.side, crop.side, 3, dtype=torch.uint8, pin_memory=self._pinned)
        return images.permute(0, 3, 1, 2), images.numpy()


PILLOW = Pillow()


def decoder_for(device: torch.device) -> Decoder:
    """Return the decoder for engines on `device`."""
    if device.type != "cuda":
        return PILLOW
    return _gpu_decoder(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _gpu_decoder(index: int) -> Decoder:
    return NvJpeg.create(torch.device("cuda", index)) or Pillow(pinned=True)
