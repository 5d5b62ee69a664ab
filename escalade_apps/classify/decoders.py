"""Decoders for an engine: nvJPEG on a GPU where torchvision provides it, otherwise Pillow.

Files that nvJPEG does not support are decoded by Pillow, whose pixels are the reference. nvJPEG's differ by rounding,
and at color edges by how the subsampled chroma planes are upsampled. Nothing else differs: `resizing` is bit-exact with
Pillow. A GPU test bounds the mean difference over an image by `MAX_MEAN_DIFFERENCE`. torchvision's CPU decoder uses
libjpeg-turbo like Pillow's, and was no faster on the one processor (aarch64) it was tried on.
"""

from __future__ import annotations

import functools
import importlib
import io
import logging
import pathlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

import numpy as np
import PIL
import torch
from PIL import Image

from escalade.device.streams import dedicated_stream
from escalade_apps.classify import resizing
from escalade_apps.classify.decode_worker import ReadResult
from escalade_apps.classify.images import Crop, DecodedImage, Source, Unreadable, try_decode
from escalade_apps.classify.jpeg import JpegBytes
from escalade_apps.classify.reading import decode_all, map_ordered, open_all

logger = logging.getLogger("escalade")
_THREADS = 3
_MAX_IMAGES = 128
"""Images per call of nvJPEG. On an H200 it decoded 8% more images per second than with 32."""
_MAX_VALUES = 2**28
"""Bytes of decoded images per thread at a time."""
_PROBE = Image.new("RGB", (32, 32), (200, 120, 40))
"""Test image. It has one color, so that decoders agree on it up to rounding."""
_PROBE_TOLERANCE = 4
MAX_MEAN_DIFFERENCE = 1.5
"""Bound on the mean absolute difference to Pillow, of 255. Measured on an H200 over photographs: 0.41, at most 0.44,
and 0.16 without chroma subsampling. The test's steeper color edges add up to 0.96, because nvJPEG repeats chroma values
where Pillow interpolates. These figures date from when PyTorch resized, which rounds once where Pillow rounds twice."""


@dataclass(frozen=True)
class Batch:
    """One uint8 batch. Row i of `images` is `files[i]`; further rows are padding. `skipped` could not be read."""

    files: list[Source]
    images: torch.Tensor
    skipped: list[Unreadable]


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


class NvJpeg:
    """Decodes into the memory of a GPU with torchvision's nvJPEG, and resizes there.

    Worker processes, one per core, read the files and decode with Pillow what nvJPEG does not support. Three threads
    handle about a hundred images each: torchvision decodes for one thread at a time, while the others resize theirs in
    one launch or wait. Decoding stays the bottleneck only if Python spends far less than 100 us per image, because
    these threads share the GIL.
    """

    def __init__(self, reader: Any, version: str, device: torch.device) -> None:
        self.name = f"nvJPEG of torchvision {version}, Pillow for unsupported files"
        self._reader = reader
        self._device = device
        # Our own stream gets its own pool of memory. nvJPEG writes without waiting for other streams, so PyTorch must
        # not hand it memory that this stream still reads.
        self._stream = dedicated_stream(device) if device.type == "cuda" else None

    @staticmethod
    def create(device: torch.device) -> NvJpeg | None:
        """Return None if torchvision is not installed, has no nvJPEG, or was built for another PyTorch."""
        try:
            version = str(importlib.import_module("torchvision").__version__)
            decoder = NvJpeg(importlib.import_module("torchvision.io"), version, device)
            return decoder if decoder._works() else None
        except Exception as error:
            logger.debug("nvJPEG is not used: %s", error)
            return None

    def batches(self, files: Sequence[Source], crop: Crop, batch: int) -> Generator[Batch, None, None]:
        """Yield batches of one size. Keep their memory alive until the GPU has read it."""
        group_size = batch * max(_MAX_IMAGES // batch, 1)
        opened = open_all(files, crop, (_THREADS + 1) * group_size)
        decode = partial(self._batches, crop=crop, batch=batch)
        groups = map_ordered(_grouped(opened, group_size), decode, _THREADS, _THREADS)
        with closing(opened), closing(groups):
            for group in groups:
                yield from group

    def _works(self) -> bool:
        encoded = io.BytesIO()
        _PROBE.save(encoded, "JPEG")
        contents = np.array(np.frombuffer(encoded.getvalue(), np.uint8))
        (image,) = self._decode([JpegBytes(pathlib.Path(), contents, *_PROBE.size)])
        expected = torch.from_numpy(np.array(_PROBE)).permute(2, 0, 1)
        return image is not None and bool((image.cpu().int() - expected).abs().max() <= _PROBE_TOLERANCE)

    def _batches(self, group: Sequence[ReadResult], crop: Crop, batch: int) -> list[Batch]:
        """Return the batches of a group, the last one padded with copies of its last image."""
        images = [each for each in group if not isinstance(each, Unreadable)]
        with torch.cuda.stream(self._stream):
            squares = torch.empty(
                len(images), crop.side, crop.side, 3, dtype=torch.uint8, device=self._device
            )
        resized = self._decode_and_resize(images, crop, squares)
        files: list[Source] = []
        filled: list[int] = []
        skipped: list[Unreadable] = []
        number = -1
        with torch.cuda.stream(self._stream):
            for each in group:
                number += not isinstance(each, Unreadable)
                not_decoded = isinstance(each, JpegBytes) and number not in resized
                result = try_decode(each.file, crop) if not_decoded else each
                if isinstance(result, Unreadable):
                    skipped.append(result)
                    continue
                if isinstance(result, DecodedImage):
                    squares[number].copy_(torch.from_numpy(np.array(result.pixels)))
                files.append(each.file)
                filled.append(number)
            if not filled:
                return [Batch([], torch.empty(0, dtype=torch.uint8), skipped)]
            filled += filled[-1:] * (-len(filled) % batch)
            if filled != list(range(len(squares))):
                squares = squares[filled]
        self._synchronize()
        names = (files[start : start + batch] for start in range(0, len(files), batch))
        pairs = zip(names, squares.permute(0, 3, 1, 2).split(batch), strict=True)
        return [Batch(some, images, [] if number else skipped) for number, (some, images) in enumerate(pairs)]

    def _decode_and_resize(
        self, images: Sequence[JpegBytes | DecodedImage], crop: Crop, squares: torch.Tensor
    ) -> set[int]:
        """Fill `squares[i]` for every JPEG file `images[i]` that nvJPEG can decode. Return these indices."""
        jpegs = {
            number: each
            for number, each in enumerate(images)
            if isinstance(each, JpegBytes) and resizing.is_supported(each.width, each.height, crop)
        }
        numbers = iter(jpegs)
        resized: set[int] = set()
        for some in _within_limits(list(jpegs.values())):
            decoded = zip(islice(numbers, len(some)), self._decode(some), strict=True)
            found = {number: image for number, image in decoded if image is not None}
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                dense = {number: image.contiguous() for number, image in found.items()}
                resizing.resize(dense, crop, squares)
            self._synchronize()  # the decoded images are freed once they have been read
            resized |= found.keys()
        return resized

    def _decode(self, jpegs: Sequence[JpegBytes]) -> list[torch.Tensor | None]:
        """Decode to [3, height, width] each. A damaged file fails the whole call, so it is isolated by bisection."""
        contents = [torch.from_numpy(each.contents) for each in jpegs]
        mode = self._reader.ImageReadMode.RGB
        try:
            images = self._reader.decode_jpeg(contents, mode=mode, device=self._device)
        except RuntimeError:
            half = len(jpegs) // 2
            return self._decode(jpegs[:half]) + self._decode(jpegs[half:]) if half else [None]
        return [
            image if image.shape == (3, each.height, each.width) else None
            for each, image in zip(jpegs, images, strict=True)
        ]

    def _synchronize(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _grouped(opened: Iterable[Sequence[ReadResult]], count: int) -> Iterator[list[ReadResult]]:
    """Regroup results so that each group but the last has `count` readable images."""
    group: list[ReadResult] = []
    images = 0
    for some in opened:
        for each in some:
            group.append(each)
            images += not isinstance(each, Unreadable)
            if images == count:
                yield group
                group, images = [], 0
    if group:
        yield group


def _within_limits(jpegs: Sequence[JpegBytes]) -> Iterator[list[JpegBytes]]:
    """Split into groups of at most `_MAX_IMAGES` images and `_MAX_VALUES` decoded bytes, or one larger image."""
    group: list[JpegBytes] = []
    left = _MAX_VALUES
    for each in jpegs:
        values = 3 * each.width * each.height
        if group and (values > left or len(group) == _MAX_IMAGES):
            yield group
            group, left = [], _MAX_VALUES
        group.append(each)
        left -= values
    if group:
        yield group


def decoder_for(device: torch.device) -> Decoder:
    """Return the decoder for engines on `device`."""
    if device.type != "cuda":
        return PILLOW
    return _gpu_decoder(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def _gpu_decoder(index: int) -> Decoder:
    return NvJpeg.create(torch.device("cuda", index)) or Pillow(pinned=True)
