"""Which decoder reads image files for an engine: here it is decided, and whoever asks gets batches of one form.

nvJPEG is for engines on a GPU, where torchvision is installed and decodes there. Pillow is for all others, and for
every file that nvJPEG does not take; its pixels are the measure. Those of nvJPEG differ from them by how decoders
round, and at edges of colours by how they enlarge the planes that JPEG keeps at half the size; a test on a GPU holds
them to `MEAN_OFF` of 255 in the mean over an image. torchvision's decoder on the CPU is a libjpeg-turbo as Pillow's,
and was no faster on the one processor (aarch64) that it was tried on.
"""

from __future__ import annotations

import functools
from collections.abc import Generator, Iterable
from contextlib import closing
from typing import Protocol

import PIL
import torch

from escalade.classify.images import Batch, Crop, Source, Unreadable, decode_all
from escalade.classify.nvjpeg import NvJpeg

MEAN_OFF = 2.0
"""A limit that was set, not measured."""


class Decoder(Protocol):
    """From files to batches."""

    name: str
    """What output and records say of it."""

    def batches(self, files: Iterable[Source], crop: Crop, batch: int) -> Generator[Batch, None, None]:
        """Batches of one size, so that the engine needs one plan: a last one that is not full holds other images too.

        The order is that of the files. The last batch may be of no file, if only such as cannot be read were left.
        """


class Pillow:
    """Batches in host memory, the same each time: the engine copies one before it asks for the next."""

    name = f"Pillow {PIL.__version__}"

    def batches(self, files: Iterable[Source], crop: Crop, batch: int) -> Generator[Batch, None, None]:
        room = torch.zeros(batch, crop.side, crop.side, 3, dtype=torch.uint8)
        images, rows = room.permute(0, 3, 1, 2), room.numpy()
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
        if names or refused:
            yield Batch(names, images, refused)


PILLOW = Pillow()


def decoder_for(device: torch.device) -> Decoder:
    """The one for engines on that device."""
    if device.type != "cuda":
        return PILLOW
    return _on_gpu(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _on_gpu(index: int) -> Decoder:
    return NvJpeg.found(torch.device("cuda", index)) or PILLOW
