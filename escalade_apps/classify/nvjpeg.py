"""JPEG files decoded on the GPU by nvJPEG, which torchvision brings, and resized there.

Files are read and looked at by processes, one for each core; what nvJPEG is not given, Pillow decodes there. Three
threads take a hundred images or so each: torchvision decodes those of one thread at a time, and those of the others are
resized meanwhile, all in one launch, or wait for their turn. That nothing but decoding is waited for takes far less
than 100 us of Python an image, since all of these threads share the interpreter's lock.
"""

from __future__ import annotations

import importlib
import io
import logging
import pathlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from PIL import Image

from escalade.device.streams import dedicated_stream
from escalade_apps.classify import resizing
from escalade_apps.classify.batch import Batch
from escalade_apps.classify.decode_worker import Opened
from escalade_apps.classify.images import Crop, Picture, Source, Unreadable, attempt
from escalade_apps.classify.jpeg import Photograph
from escalade_apps.classify.reading import in_order, open_all

logger = logging.getLogger("escalade")
_WORKERS = 3
_AT_ONCE = 128
"""Images that nvJPEG is given at a time: on an H200 it decoded 8% more a second than of 32."""
_ROOM = 2**28
"""Values of decoded images in each of those threads at a time."""
_TRIED = Image.new("RGB", (32, 32), (200, 120, 40))
_CLOSE = 4
"""An image to try it with, and how far it may be off: of one colour decoders make the same but for rounding."""


class NvJpeg:
    """Batches in the memory of a GPU."""

    def __init__(self, reader: Any, version: str, device: torch.device) -> None:
        self.name = f"nvJPEG of torchvision {version}, Pillow for what it does not take"
        self._reader = reader
        self._device = device
        # With memory of its own: nvJPEG writes without waiting for other streams, and what PyTorch gives it must not be
        # what is still read here.
        self._stream = dedicated_stream(device) if device.type == "cuda" else None

    @staticmethod
    def found(device: torch.device) -> NvJpeg | None:
        """None where torchvision is not installed, was built without nvJPEG, or was built for another PyTorch."""
        try:
            version = str(importlib.import_module("torchvision").__version__)
            decoder = NvJpeg(importlib.import_module("torchvision.io"), version, device)
            return decoder if decoder._works() else None
        except Exception as error:
            logger.debug("nvJPEG is not used: %s", error)
            return None

    def batches(self, files: Sequence[Source], crop: Crop, batch: int) -> Generator[Batch, None, None]:
        """Batches of one size, in memory that is to be kept until what reads it is done."""
        chunk = batch * max(_AT_ONCE // batch, 1)
        opened = open_all(files, crop, (_WORKERS + 1) * chunk)
        make = partial(self._batches, crop=crop, batch=batch)
        made = in_order(_grouped(opened, chunk), make, _WORKERS, _WORKERS)
        with closing(opened), closing(made):
            for some in made:
                yield from some

    def _works(self) -> bool:
        written = io.BytesIO()
        _TRIED.save(written, "JPEG")
        tried = Photograph(
            pathlib.Path(), np.array(np.frombuffer(written.getvalue(), np.uint8)), *_TRIED.size
        )
        (image,) = self._decoded([tried])
        expected = torch.from_numpy(np.array(_TRIED)).permute(2, 0, 1)
        return image is not None and bool((image.cpu().int() - expected).abs().max() <= _CLOSE)

    def _batches(self, group: Sequence[Opened], crop: Crop, batch: int) -> list[Batch]:
        """The images of a group; where the last of its batches is not full, the last image again and again."""
        images = [each for each in group if not isinstance(each, Unreadable)]
        with torch.cuda.stream(self._stream):
            squares = torch.empty(
                len(images), crop.side, crop.side, 3, dtype=torch.uint8, device=self._device
            )
        resized = self._resize(images, crop, squares)
        files: list[Source] = []
        filled: list[int] = []
        refused: list[Unreadable] = []
        number = -1
        with torch.cuda.stream(self._stream):
            for each in group:
                number += not isinstance(each, Unreadable)
                is_left = isinstance(each, Photograph) and number not in resized
                made = attempt(each.file, crop) if is_left else each
                if isinstance(made, Unreadable):
                    refused.append(made)
                    continue
                if isinstance(made, Picture):
                    squares[number].copy_(torch.from_numpy(np.array(made.pixels)))
                files.append(each.file)
                filled.append(number)
            if not filled:
                return [Batch([], torch.empty(0, dtype=torch.uint8), refused)]
            filled += filled[-1:] * (-len(filled) % batch)
            if filled != list(range(len(squares))):
                squares = squares[filled]
        self._settle()
        names = (files[place : place + batch] for place in range(0, len(files), batch))
        made_of = zip(names, squares.permute(0, 3, 1, 2).split(batch), strict=True)
        return [
            Batch(some, images, [] if number else refused) for number, (some, images) in enumerate(made_of)
        ]

    def _resize(self, images: Sequence[Photograph | Picture], crop: Crop, squares: torch.Tensor) -> set[int]:
        """Fills the squares of the photographs that nvJPEG takes, [side, side, 3] each, and says which these are."""
        photographs = {
            number: each
            for number, each in enumerate(images)
            if isinstance(each, Photograph) and resizing.is_taken(each.width, each.height, crop)
        }
        numbers = iter(photographs)
        resized: set[int] = set()
        for some in _pieces(list(photographs.values())):
            decoded = zip(islice(numbers, len(some)), self._decoded(some), strict=True)
            found = {number: image for number, image in decoded if image is not None}
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                dense = {number: image.contiguous() for number, image in found.items()}
                resizing.resize(dense, crop, squares)
            self._settle()  # the decoded images go when they have been read
            resized |= found.keys()
        return resized

    def _decoded(self, photographs: Sequence[Photograph]) -> list[torch.Tensor | None]:
        """Each as [3, height, width]. A damaged file refuses all those given with it, and is sought by halves."""
        contents = [torch.from_numpy(each.contents) for each in photographs]
        mode = self._reader.ImageReadMode.RGB
        try:
            images = self._reader.decode_jpeg(contents, mode=mode, device=self._device)
        except RuntimeError:
            half = len(photographs) // 2
            return self._decoded(photographs[:half]) + self._decoded(photographs[half:]) if half else [None]
        return [
            image if image.shape == (3, each.height, each.width) else None
            for each, image in zip(photographs, images, strict=True)
        ]

    def _settle(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()


def _grouped(opened: Iterable[Sequence[Opened]], count: int) -> Iterator[list[Opened]]:
    """So many at a time as there are `count` images among; the last may be fewer."""
    group: list[Opened] = []
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


def _pieces(photographs: Sequence[Photograph]) -> Iterator[list[Photograph]]:
    """Groups of photographs that there is room for together, or one that is larger."""
    piece: list[Photograph] = []
    room = _ROOM
    for each in photographs:
        values = 3 * each.width * each.height
        if piece and (values > room or len(piece) == _AT_ONCE):
            yield piece
            piece, room = [], _ROOM
        piece.append(each)
        room -= values
    if piece:
        yield piece
