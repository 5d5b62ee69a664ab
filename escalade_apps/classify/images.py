"""Find image files and decode them to cropped RGB pixels with Pillow.

Must not import PyTorch: decode workers import this module.
"""

from __future__ import annotations

import io
import math
import os
import pathlib
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
from PIL import Image, ImageOps
from PIL.JpegImagePlugin import JpegImageFile

from escalade.errors import UnsupportedError
from escalade.terminal_text import printable

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Suffixes picked up from folders. A file passed by name is tried whatever its suffix."""
_EIGHT_BIT_MODES = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
"""Pillow modes whose conversion to RGB keeps black and white."""
_MODE_NAMES = {"F": "floating-point numbers", "I": "32-bit integers"}
# TIFF tags and values of theirs.
_BITS_PER_SAMPLE, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339
_WHITE_IS_ZERO, _UNSIGNED = 0, 1
_MAX_SINGLE_READ = 2**26
"""Files of up to this many bytes are read with one call."""


@dataclass(frozen=True)
class Encoded:
    """Image that is not a local file: a name, and a function that returns its encoded bytes."""

    name: str
    read: Callable[[], bytes]

    def __str__(self) -> str:
        return self.name


Source = pathlib.Path | Encoded


@dataclass(frozen=True)
class Unreadable:
    """Image or folder that was skipped, and the reason."""

    file: Source
    reason: str


@dataclass(frozen=True)
class DecodedImage:
    """Decoded and cropped image; `pixels` is uint8, [side, side, 3]."""

    file: Source
    pixels: np.ndarray


@dataclass(frozen=True)
class Crop:
    """Resize the shorter side to `resize`, then take the center square of `side` pixels."""

    resize: int
    side: int

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """Return the width and height of the whole image after resizing."""
        shorter = min(width, height)
        wide, high = int(self.resize * width / shorter), int(self.resize * height / shorter)
        if (wide, high) != (width, height) and wide * high > (Image.MAX_IMAGE_PIXELS or math.inf):
            raise ValueError(f"{width} x {height} pixels resize to {wide} x {high}, above Pillow's limit")
        return wide, high

    def corner(self, width: int, height: int) -> tuple[int, int]:
        """Return the left and top offset of the square in a resized image."""
        return round((width - self.side) / 2), round((height - self.side) / 2)

    def boxes(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source boxes, as (left, top) and (right, bottom), for images of [count, 2] widths and heights."""
        resized = (self.resize * sizes / sizes.min(1, keepdims=True)).astype(int)
        corner = np.rint((resized - self.side) / 2)
        scale = sizes / resized
        return corner * scale, (corner + self.side) * scale


def find(paths: Sequence[pathlib.Path]) -> tuple[list[pathlib.Path], list[Unreadable]]:
    """Return the files, with folders expanded to the images below them in order, and the folders that cannot be read.

    Symbolic links to folders are not followed.
    """
    found: list[pathlib.Path] = []
    unreadable: list[Unreadable] = []

    def skip(error: OSError) -> None:
        reason = f"the folder cannot be opened: {_reason(error)}"
        unreadable.append(Unreadable(pathlib.Path(error.filename), reason))

    for path in paths:
        if os.path.isdir(path):
            found += sorted(
                pathlib.Path(folder, name)
                for folder, _, names in os.walk(path, onerror=skip)
                for name in names
                if name.lower().endswith(SUFFIXES)
            )
        else:
            found.append(path)
    if not found:
        folders = ", ".join(printable(path) for path in paths)
        reasons = "".join(f"; {printable(each.file)}: {each.reason}" for each in unreadable)
        raise UnsupportedError(
            f"no images in {folders}; supported suffixes are {' '.join(SUFFIXES)}{reasons}"
        )
    return found, unreadable


def require_any(files: Sequence[pathlib.Path]) -> None:
    """Raise if none of the files exists. If some do, the missing ones are reported as unreadable later."""
    if not any(map(os.path.exists, files)):
        others = f" (and {len(files) - 1} more)" if len(files) > 1 else ""
        raise UnsupportedError(f"no such file: {printable(files[0])}{others}")


def decode(file: Source, crop: Crop) -> np.ndarray:
    """Return the cropped pixels of an image. Raises for anything but a regular file."""
    with open_source(file) as encoded, Image.open(encoded) as opened:
        if isinstance(opened, JpegImageFile):
            # Decode in one block: between blocks Pillow takes the GIL, which other threads hold.
            opened.decodermaxblock = _MAX_SINGLE_READ
        return pixels(opened, crop)


def pixels(opened: Image.Image, crop: Crop) -> np.ndarray:
    """Apply the EXIF orientation, convert to RGB, resize with antialiasing and crop, as torchvision does with Pillow.

    Only the first frame or page is used, and transparency is dropped. `opened` itself is rotated, not a copy.
    """
    image = _rgb(opened)
    if crop.resized(*image.size) == image.size:
        left, top = crop.corner(*image.size)
        return np.asarray(image.crop((left, top, left + crop.side, top + crop.side)))
    # Resize only the crop: a resized pixel does not depend on whether its neighbors are computed.
    corner, end = crop.boxes(np.array([image.size]))
    box = (*corner[0].tolist(), *end[0].tolist())
    return np.asarray(image.resize((crop.side, crop.side), Image.Resampling.BILINEAR, box))


def open_source(file: Source) -> IO[bytes]:
    """Open an image for reading, from memory unless the file is very large."""
    if isinstance(file, Encoded):
        return io.BytesIO(file.read())
    contents = read_all(file)
    return open(file, "rb") if contents is None else io.BytesIO(contents.data)


def read_all(file: Source) -> np.ndarray | None:
    """Return the bytes of an image, or None for a file that is too large or of unknown size.

    Uses four system calls, because each one releases the GIL and gets it back late. `np.empty` does not zero the
    memory, which would hold the GIL.
    """
    if isinstance(file, Encoded):
        return np.array(np.frombuffer(file.read(), np.uint8))
    found = os.stat(file)
    if not stat.S_ISREG(found.st_mode):  # reading a pipe could block forever
        raise ValueError("not a regular file")
    if not 0 < found.st_size <= _MAX_SINGLE_READ:
        return None
    contents = np.empty(found.st_size, np.uint8)
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.readv(descriptor, [contents.data])
    finally:
        os.close(descriptor)
    return contents if size == contents.size else None


def _rgb(opened: Image.Image) -> Image.Image:
    """Return the image upright with 8 bits per channel, scaled from the file's black and white to 0 and 255."""
    mode, tags = opened.mode, getattr(opened, "tag_v2", {})
    signed = any(kind != _UNSIGNED for kind in tags.get(_SAMPLE_FORMAT, ()))
    if mode in _EIGHT_BIT_MODES and not signed:
        # In place, and without a conversion from RGB to RGB: each copy of a photograph is a tenth of the work on it.
        ImageOps.exif_transpose(opened, in_place=True)
        if mode == "RGB":
            return opened
        # Via RGBA: Pillow warns when a palette with transparency is converted directly to RGB.
        return opened.convert("RGBA").convert("RGB") if mode in ("P", "PA") else opened.convert("RGB")
    white = _white(opened, tags)
    if white is None or signed:
        kind = _MODE_NAMES.get(mode, f"of Pillow mode {mode}")
        raise ValueError(
            f"its pixels are {'signed, ' if signed else ''}{kind}, and the file does not define which value is white; "
            "8 bits per channel and 16-bit gray are supported"
        )
    values = np.asarray(ImageOps.exif_transpose(opened)).astype(np.int64).clip(0, white)
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        values = white - values
    return Image.fromarray(((values * 255 + white // 2) // white).astype(np.uint8)).convert("RGB")


def _white(opened: Image.Image, tags: Mapping[int, Any]) -> int | None:
    """Return the value of white in a gray image with more than 8 bits, or None if the format does not define it."""
    if opened.mode.startswith("I;16") and opened.format == "TIFF":
        (bits,) = tags.get(_BITS_PER_SAMPLE, (16,))
        return int((1 << bits) - 1)
    if (opened.mode.startswith("I;16") and opened.format in ("PNG", "JPEG2000")) or (
        opened.mode == "I" and opened.format in ("PNG", "PPM")
    ):
        return 0xFFFF  # Pillow scales images of fewer bits to 16
    return None


def try_decode(file: Source, crop: Crop) -> DecodedImage | Unreadable:
    """Decode an image with Pillow, or return the reason why it cannot be read."""
    try:
        return DecodedImage(file, decode(file, crop))
    except FileNotFoundError:
        return Unreadable(file, "no such file")
    except Image.UnidentifiedImageError:
        return Unreadable(file, "not an image format that Pillow supports")
    except Image.DecompressionBombError:
        return Unreadable(file, f"it has more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels")
    except Exception as error:  # Pillow's plugins raise arbitrary exceptions for damaged files
        return Unreadable(file, _reason(error))


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
