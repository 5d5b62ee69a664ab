"""Which decoder reads image files for an engine: here it is decided, and whoever asks gets batches of one form.

nvJPEG is for engines on a GPU, where torchvision is installed and decodes there. Pillow is for all others, and for
every file that nvJPEG does not take; its pixels are the measure. Those of nvJPEG differ from them by how decoders
round, and at edges of colours by how they enlarge the planes that JPEG keeps at half the size, and by nothing behind
that: `resizing` is Pillow's to the bit. A test on a GPU holds them to `MEAN_OFF` of 255 in the mean over an image.
torchvision's decoder on the CPU is a libjpeg-turbo as Pillow's, and was no faster on the one processor (aarch64) that
it was tried on.
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

MEAN_OFF = 1.5
"""On an H200 the mean over a photograph, resized and cropped, was off by 0.41, at the most by 0.44; by 0.16 where JPEG
keeps all planes whole. Colours change more steeply in the test: there it makes up to 0.96 that values of a smaller
plane are repeated, where Pillow goes from one to the next. All of it was measured when PyTorch resized, which rounds
once where Pillow rounds twice."""


class Decoder(Protocol):
    """From files to batches."""

    name: str
    """What output and records say of it."""

    def batches(self, files: Sequence[Source], crop: Crop, batch: int) -> Generator[Batch, None, None]:
        """Batches of one size, so that the engine needs one plan: a last one that is not full holds other images too.

        The order is that of the files. The last batch may be of no file, if only such as cannot be read were left.
        """


class Pillow:
    """Batches in host memory; for an engine on a GPU in such as its copies are made from, so that nobody else's are."""

    name = f"Pillow {PIL.__version__}"

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned

    def batches(self, files: Sequence[Source], crop: Crop, batch: int) -> Generator[Batch, None, None]:
        images, rows = self._room(crop, batch)
        names: list[Source] = []
        refused: list[Unreadable] = []
        with closing(decode_all(files, crop, ahead=2 * batch)) as pictures:
            for picture in pictures:
                if isinstance(picture, Unreadable):
                    refused.append(picture)
                    continue
                rows[len(names)] = picture.pixels
                names.append(picture.file)
                if len(names) == batch:
                    yield Batch(names, images, refused)
                    names, refused = [], []
                    images, rows = self._room(crop, batch)
        if names or refused:
            rows[len(names) :] = 0
            yield Batch(names, images, refused)

    def _room(self, crop: Crop, batch: int) -> tuple[torch.Tensor, np.ndarray]:
        """Memory for a batch, of its own: copies of it may still be under way when the next is made."""
        room = torch.empty(batch, crop.side, crop.side, 3, dtype=torch.uint8, pin_memory=self._pinned)
        return room.permute(0, 3, 1, 2), room.numpy()


PILLOW = Pillow()


def decoder_for(device: torch.device) -> Decoder:
    """The one for engines on that device."""
    if device.type != "cuda":
        return PILLOW
    return _on_gpu(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _on_gpu(index: int) -> Decoder:
    return NvJpeg.found(torch.device("cuda", index)) or Pillow(pinned=True)
