"""Detect JPEG files that all decoders agree on: complete, one upright image, YCbCr with 8 bits per channel."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np
from PIL import Image

from escalade_apps.classify.images import Crop, DecodedImage, Source, Unreadable, read_all, try_decode

_START, _END = b"\xff\xd8", b"\xff\xd9"
_FRAMES = (0xC0, 0xC1, 0xC2)
"""Start-of-frame markers: baseline, extended and progressive, with Huffman coding."""
_OTHER_FRAMES = (0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)
_SCAN, _EXIF, _MULTI_PICTURE, _ADOBE = 0xDA, 0xE1, 0xE2, 0xEE
_INSPECTED = frozenset((*_FRAMES, *_OTHER_FRAMES, _EXIF, _MULTI_PICTURE, _ADOBE))
_HEADER = struct.Struct(">BBH")
_FRAME_LENGTH = 15
"""Bytes of a frame header with three components, three bytes each."""
_ORIENTATION = 0x0112


class JpegBytes(NamedTuple):
    """Encoded JPEG file, with the size from its header."""

    file: Source
    contents: np.ndarray
    width: int
    height: int


def read(file: Source, crop: Crop) -> JpegBytes | None:
    """Read a JPEG file that all decoders agree on. Returns None for any other file, which is left to Pillow."""
    try:
        contents = read_all(file)
    except Exception:  # storage back ends raise arbitrary exceptions; decoding with Pillow reports them
        return None
    size = None if contents is None else _size(contents.data)
    if contents is None or size is None or size[0] * size[1] > (Image.MAX_IMAGE_PIXELS or 0):
        return None
    try:
        crop.resized(*size)
    except ValueError:
        return None
    return JpegBytes(file, contents, *size)


def read_jpeg_or_decode(file: Source, crop: Crop) -> JpegBytes | DecodedImage | Unreadable:
    """Return the bytes of a JPEG file that all decoders agree on; decode any other file with Pillow."""
    return read(file, crop) or try_decode(file, crop)


def _size(contents: memoryview) -> tuple[int, int] | None:
    """Return width and height, or None if the file is cut off or its headers have something that decoders differ in.

    They differ in EXIF orientation, multi-picture files, gray images and color spaces other than YCbCr.
    """
    if contents[: len(_START)] != _START or contents[-len(_END) :] != _END:
        return None
    offset, size, last = len(_START), None, len(contents) - _HEADER.size
    while offset <= last:
        begin, marker, length = _HEADER.unpack_from(contents, offset)
        if begin != 0xFF:
            return None
        if marker == _SCAN:
            return size
        if marker not in _INSPECTED:
            offset += 2 + length
            continue
        body = bytes(contents[offset + 4 : offset + 2 + length])
        if marker in _FRAMES:
            size = _frame(body)
        if (
            marker in _OTHER_FRAMES
            or (marker in _FRAMES and size is None)
            or (marker == _EXIF and body.startswith(b"Exif") and _is_rotated(body))
            or (marker == _MULTI_PICTURE and body.startswith(b"MPF"))
            or (marker == _ADOBE and body.startswith(b"Adobe") and body[11:12] != b"\x01")
        ):
            return None
        offset += 2 + length
    return None


def _frame(body: bytes) -> tuple[int, int] | None:
    """Return width and height of a frame with three 8-bit components not named R, G and B, else None."""
    if len(body) != _FRAME_LENGTH or body[0] != 8 or body[5] != 3 or body[6::3] == b"RGB":
        return None
    height, width = int.from_bytes(body[1:3]), int.from_bytes(body[3:5])
    return (width, height) if width and height else None


def _is_rotated(body: bytes) -> bool:
    """Return True if the EXIF orientation is not upright or cannot be read."""
    exif = Image.Exif()
    try:
        exif.load(body)
    except Exception:  # damaged EXIF data: leave the whole file to Pillow
        return True
    return exif.get(_ORIENTATION, 1) != 1
