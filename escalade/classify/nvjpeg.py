"""JPEG files decoded on the GPU by nvJPEG, which torchvision brings, and resized there.

Files are read and looked at by a thread for each core. Two more threads take a batch each: torchvision decodes one
batch at a time, and the other one is resized meanwhile. What nvJPEG is not given, or does not take, Pillow decodes.
"""

from __future__ import annotations

import importlib
import io
import logging
import pathlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from escalade.classify import jpeg
from escalade.classify.images import Batch, Crop, Picture, Source, Unreadable, attempt, in_order
from escalade.classify.jpeg import Photograph
from escalade.device.streams import own_stream

logger = logging.getLogger("escalade")
_WORKERS = 2
_ROOM = 2**28
"""Values of decoded images in each of those threads at a time."""
_TRIED = Image.new("RGB", (32, 32), (200, 120, 40))
_CLOSE = 4
"""An image to try it with, and how far it may be off: of one colour decoders make the same but for rounding."""
Opened = Photograph | Picture | Unreadable


class NvJpeg:
    """Batches in the memory of a GPU."""

    def __init__(self, reader: Any, version: str, device: torch.device) -> None:
        self.name = f"nvJPEG of torchvision {version}, Pillow for what it does not take"
        self._reader = reader
        self._device = device
        # With memory of its own: nvJPEG writes without waiting for other streams, and what PyTorch gives it must not be
        # what is still read here.
        self._stream = own_stream(device) if device.type == "cuda" else None

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

    def batches(self, files: Iterable[Source], crop: Crop, batch: int) -> Generator[Batch, None, None]:
        """Batches of one size, each in memory of its own, which is to be kept until what reads it is done."""
        opened = in_order(files, partial(_opened, crop=crop), (_WORKERS + 1) * batch)
        make = partial(self._batch, crop=crop, batch=batch)
        made = in_order(_grouped(opened, batch), make, _WORKERS, _WORKERS)
        with closing(opened), closing(made):
            yield from made

    def _works(self) -> bool:
        written = io.BytesIO()
        _TRIED.save(written, "JPEG")
        tried = Photograph(pathlib.Path(), bytearray(written.getvalue()), *_TRIED.size)
        (image,) = self._decoded([tried])
        expected = torch.from_numpy(np.array(_TRIED)).permute(2, 0, 1)
        return image is not None and bool((image.cpu().int() - expected).abs().max() <= _CLOSE)

    def _batch(self, group: Sequence[Opened], crop: Crop, batch: int) -> Batch:
        """The images of a group; where there are fewer than `batch`, the last one again and again behind them."""
        squares = iter(self._squares([each for each in group if isinstance(each, Photograph)], crop))
        files: list[Source] = []
        rows: list[torch.Tensor] = []
        refused: list[Unreadable] = []
        with torch.cuda.stream(self._stream):
            for each in group:
                made = next(squares) if isinstance(each, Photograph) else each
                if made is None:
                    made = attempt(each.file, crop)
                if isinstance(made, Unreadable):
                    refused.append(made)
                    continue
                if isinstance(made, Picture):
                    made = torch.from_numpy(np.array(made.pixels)).to(self._device)
                files.append(each.file)
                rows.append(made)
            if not rows:
                return Batch([], torch.empty(0, dtype=torch.uint8), refused)
            images = torch.stack(rows + rows[-1:] * (batch - len(rows))).permute(0, 3, 1, 2)
        self._settle()
        return Batch(files, images, refused)

    def _squares(self, photographs: Sequence[Photograph], crop: Crop) -> list[torch.Tensor | None]:
        """Each as [side, side, 3] on the device; None for those that nvJPEG does not take."""
        squares: list[torch.Tensor | None] = []
        for some in _pieces(photographs):
            decoded = self._decoded(some)
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                made = iter(_cropped([image for image in decoded if image is not None], crop))
            self._settle()  # the decoded images go when they have been read
            squares += [None if image is None else next(made) for image in decoded]
        return squares

    def _decoded(self, photographs: Sequence[Photograph]) -> list[torch.Tensor | None]:
        """Each as [3, height, width]. A damaged file refuses all those given with it, and is sought by halves."""
        contents = [torch.frombuffer(each.contents, dtype=torch.uint8) for each in photographs]
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


def _opened(file: Source, crop: Crop) -> Opened:
    return jpeg.read(file, crop) or attempt(file, crop)


def _grouped(opened: Iterable[Opened], batch: int) -> Iterator[list[Opened]]:
    """So many at a time as there are `batch` images among; the last may be fewer."""
    group: list[Opened] = []
    images = 0
    for each in opened:
        group.append(each)
        images += not isinstance(each, Unreadable)
        if images == batch:
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
        if piece and values > room:
            yield piece
            piece, room = [], _ROOM
        piece.append(each)
        room -= values
    if piece:
        yield piece


def _cropped(images: Sequence[torch.Tensor], crop: Crop) -> list[torch.Tensor]:
    """[3, height, width] each to [side, side, 3], as Pillow does it but for rounding; those of one size at once."""
    places: dict[tuple[int, int], list[int]] = {}
    for place, image in enumerate(images):
        places.setdefault((image.shape[2], image.shape[1]), []).append(place)
    made: dict[int, torch.Tensor] = {}
    for size, alike in places.items():
        whole = torch.stack([images[place] for place in alike])
        wide, high = crop.resized(*size)
        if (wide, high) != size:
            whole = F.interpolate(whole.float(), (high, wide), mode="bilinear", antialias=True).round()
        left, top = crop.corner(wide, high)
        part = whole[:, :, top : top + crop.side, left : left + crop.side].to(torch.uint8)
        made.update(zip(alike, part.permute(0, 2, 3, 1), strict=True))
    return [made[place] for place in range(len(images))]
