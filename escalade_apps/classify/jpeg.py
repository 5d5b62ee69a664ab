"""JPEG files that every decoder reads alike: 8 bits a channel, YCbCr, upright, one image, whole to its last byte."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from PIL import Image

from escalade_apps.classify.images import Crop, Picture, Source, Unreadable, attempt, whole

_START, _END = b"\xff\xd8", b"\xff\xd9"
_FRAMES = (0xC0, 0xC1, 0xC2)
"""Baseline, extended and progressive, with Huffman codes."""
_OTHER_FRAMES = (0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)
_SCAN, _EXIF, _SEVERAL, _ADOBE = 0xDA, 0xE1, 0xE2, 0xEE
_TELLING = frozenset((*_FRAMES, *_OTHER_FRAMES, _EXIF, _SEVERAL, _ADOBE))
"""The segments that are looked into."""
_HEADER = struct.Struct(">BBH")
_FRAME_LENGTH = 15
"""Bytes of a frame's header with three components, of which each has three."""
_ORIENTATION = 0x0112


class Photograph(NamedTuple):
    """A JPEG file's bytes, and the size that they say."""

    file: Source
    contents: np.ndarray
    width: int
    height: int


def read(file: Source, crop: Crop) -> Photograph | None:
    """A file that decoders read alike; None for any other, which is left to Pillow and to Pillow's words about it."""
    try:
        contents = whole(file)
    except Exception:  # storage raises all sorts of things; Pillow's attempt says which it was
        return None
    size = None if contents is None else _size(contents.data)
    if contents is None or size is None or size[0] * size[1] > (Image.MAX_IMAGE_PIXELS or 0):
        return None
    try:
        crop.resized(*size)
    except ValueError:
        return None
    return Photograph(file, contents, *size)


def photograph_or_picture(file: Source, crop: Crop) -> Photograph | Picture | Unreadable:
    """A file that decoders read alike as it is, any other as Pillow decodes it."""
    photograph = read(file, crop)
    return attempt(file, crop) if photograph is None else photograph


def _size(contents: memoryview) -> tuple[int, int] | None:
    """Width and height, if it is a whole file whose headers have nothing that decoders differ in.

    These are: a tag that turns the image, further images, colours that are not YCbCr, grey.
    """
    if contents[: len(_START)] != _START or contents[-len(_END) :] != _END:
        return None
    place, size, last = len(_START), None, len(contents) - _HEADER.size
    while place <= last:
        begin, marker, length = _HEADER.unpack_from(contents, place)
        if begin != 0xFF:
            return None
        if marker == _SCAN:
            return size
        if marker not in _TELLING:
            place += 2 + length
            continue
        body = bytes(contents[place + 4 : place + 2 + length])
        if marker in _FRAMES:
            size = _frame(body)
        if (
            marker in _OTHER_FRAMES
            or (marker in _FRAMES and size is None)
            or (marker == _EXIF and body.startswith(b"Exif") and _is_turned(body))
            or (marker == _SEVERAL and body.startswith(b"MPF"))
            or (marker == _ADOBE and body.startswith(b"Adobe") and body[11:12] != b"\x01")
        ):
            return None
        place += 2 + length
    return None


def _frame(body: bytes) -> tuple[int, int] | None:
    """Width and height of three components of 8 bits that are not called R, G and B."""
    if len(body) != _FRAME_LENGTH or body[0] != 8 or body[5] != 3 or body[6::3] == b"RGB":
        return None
    height, width = int.from_bytes(body[1:3]), int.from_bytes(body[3:5])
    return (width, height) if width and height else None


def _is_turned(body: bytes) -> bool:
    """Whether a tag says so, or cannot be read."""
    exif = Image.Exif()
    try:
        exif.load(body)
    except Exception:  # whatever is wrong with it, Pillow is asked about the whole file
        return True
    return exif.get(_ORIENTATION, 1) != 1
