"""Image files: which there are, and their pixels as classifiers want them.

Without PyTorch, which processes that decode do not import.
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
"""What is taken from a folder; a file that is named is tried whatever it is called."""


_EIGHT_BITS = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr", "LAB", "HSV")
_KINDS = {"F": "floating-point numbers", "I": "32-bit whole numbers"}
"""Pillow's modes: those that it converts to RGB as they are meant, and what others are called."""
_BITS_PER_SAMPLE, _PHOTOMETRIC, _SAMPLE_FORMAT = 258, 262, 339
_WHITE_IS_ZERO, _UNSIGNED = 0, 1
"""Tags of TIFF files, and values of theirs."""
_WHOLE = 2**26
"""Bytes of a file up to which it is read in one piece."""


@dataclass(frozen=True)
class Encoded:
    """An image that is no file here: what it is called, and how its bytes are had."""

    name: str
    read: Callable[[], bytes]

    def __str__(self) -> str:
        return self.name


Source = pathlib.Path | Encoded


@dataclass(frozen=True)
class Unreadable:
    """An image or a folder that was passed over, and why."""

    file: Source
    reason: str


@dataclass(frozen=True)
class Picture:
    """A decoded image: `pixels` is [side, side, 3], uint8."""

    file: Source
    pixels: np.ndarray


@dataclass(frozen=True)
class Crop:
    """The shorter side is resized to `resize`, and a square of `side` taken from the middle."""

    resize: int
    side: int

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """The width and height of a whole image behind the resizing."""
        shorter = min(width, height)
        wide, high = int(self.resize * width / shorter), int(self.resize * height / shorter)
        if (wide, high) != (width, height) and wide * high > (Image.MAX_IMAGE_PIXELS or math.inf):
            raise ValueError(f"{width} x {height} pixels become {wide} x {high}, more than Pillow takes")
        return wide, high

    def corner(self, width: int, height: int) -> tuple[int, int]:
        """Where the square begins in a resized image, from the left and from the top."""
        return round((width - self.side) / 2), round((height - self.side) / 2)

    def boxes(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What of images of these widths and heights the squares are made of: left and top, right and bottom."""
        resized = (self.resize * sizes / sizes.min(1, keepdims=True)).astype(int)
        corner = np.rint((resized - self.side) / 2)
        scale = sizes / resized
        return corner * scale, (corner + self.side) * scale


def find(paths: Sequence[pathlib.Path]) -> tuple[list[pathlib.Path], list[Unreadable]]:
    """Files as they are, folders as the images under them, in order; and the folders that cannot be looked through.

    Links to folders are not followed.
    """
    found: list[pathlib.Path] = []
    closed: list[Unreadable] = []

    def refused(error: OSError) -> None:
        closed.append(Unreadable(pathlib.Path(error.filename), f"the folder cannot be opened: {_why(error)}"))

    for path in paths:
        if os.path.isdir(path):
            found += sorted(
                pathlib.Path(folder, name)
                for folder, _, names in os.walk(path, onerror=refused)
                for name in names
                if name.lower().endswith(SUFFIXES)
            )
        else:
            found.append(path)
    if not found:
        folders = ", ".join(printable(path) for path in paths)
        reasons = "".join(f"; {printable(each.file)}: {each.reason}" for each in closed)
        raise UnsupportedError(
            f"there are no images in {folders}; files that end in {' '.join(SUFFIXES)} are taken{reasons}"
        )
    return found, closed


def require_any(files: Sequence[pathlib.Path]) -> None:
    """Refuses files of which not one is there; where some are, the others are said to be unreadable in their turn."""
    if not any(map(os.path.exists, files)):
        others = f", nor any of {len(files) - 1} more" if len(files) > 1 else ""
        raise UnsupportedError(f"{printable(files[0])}: there is no such file{others}")


def decode(file: Source, crop: Crop) -> np.ndarray:
    """The pixels of an image, of a file that is a regular one."""
    with open_source(file) as encoded, Image.open(encoded) as opened:
        if isinstance(opened, JpegImageFile):
            opened.decodermaxblock = (
                _WHOLE  # in one go: between blocks a thread waits for the interpreter's lock
            )
        return pixels(opened, crop)


def pixels(opened: Image.Image, crop: Crop) -> np.ndarray:
    """Upright as its EXIF tag says, RGB, resized with antialiasing and cropped: torchvision's way with PIL images.

    Of several frames or pages it is the first; what is transparent has the colour that the file gives it. What was
    opened is turned itself, not a copy.
    """
    image = _rgb(opened)
    if crop.resized(*image.size) == image.size:
        left, top = crop.corner(*image.size)
        return np.asarray(image.crop((left, top, left + crop.side, top + crop.side)))
    # Only what the square is of: a resized pixel is the same whether its neighbours are computed or not.
    corner, end = crop.boxes(np.array([image.size]))
    box = (*corner[0].tolist(), *end[0].tolist())
    return np.asarray(image.resize((crop.side, crop.side), Image.Resampling.BILINEAR, box))


def open_source(file: Source) -> IO[bytes]:
    """The bytes of an image, in memory unless they are very many."""
    if isinstance(file, Encoded):
        return io.BytesIO(file.read())
    contents = whole(file)
    return open(file, "rb") if contents is None else io.BytesIO(contents.data)


def whole(file: Source) -> np.ndarray | None:
    """All bytes of an image; None of a file that is too large for it, or that does not say how large it is.

    In four calls of the system: around each of them other threads take the interpreter's lock, and give it back late.
    The memory is not filled before, which would be done with the lock.
    """
    if isinstance(file, Encoded):
        return np.array(np.frombuffer(file.read(), np.uint8))
    found = os.stat(file)
    if not stat.S_ISREG(found.st_mode):  # a pipe would be waited for, perhaps for ever
        raise ValueError("it is no regular file")
    if not 0 < found.st_size <= _WHOLE:
        return None
    contents = np.empty(found.st_size, np.uint8)
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.readv(descriptor, [contents.data])
    finally:
        os.close(descriptor)
    return contents if size == contents.size else None


def _rgb(opened: Image.Image) -> Image.Image:
    """The image with 8 bits a channel, from black to white as the file means them, upright."""
    mode, tags = opened.mode, getattr(opened, "tag_v2", {})
    signed = any(kind != _UNSIGNED for kind in tags.get(_SAMPLE_FORMAT, ()))
    if mode in _EIGHT_BITS and not signed:
        # In place, and converted only from another mode: each copy of a photograph is a tenth of the work on it.
        ImageOps.exif_transpose(opened, in_place=True)
        if mode == "RGB":
            return opened
        # A palette with transparency is RGBA: Pillow says so in a warning where it is taken for less.
        return opened.convert("RGBA").convert("RGB") if mode in ("P", "PA") else opened.convert("RGB")
    white = _white(opened, tags)
    if white is None or signed:
        kind = _KINDS.get(mode, f"of the kind {mode}")
        raise ValueError(
            f"its pixels are {'signed, ' if signed else ''}{kind}, and the file does not say which value is white; "
            "8 bits a channel and 16-bit grey are read"
        )
    values = np.asarray(ImageOps.exif_transpose(opened)).astype(np.int64).clip(0, white)
    if tags.get(_PHOTOMETRIC) == _WHITE_IS_ZERO:
        values = white - values
    return Image.fromarray(((values * 255 + white // 2) // white).astype(np.uint8)).convert("RGB")


def _white(opened: Image.Image, tags: Mapping[int, Any]) -> int | None:
    """The largest value of a grey image with more than 8 bits; None if it could be any."""
    if opened.mode.startswith("I;16") and opened.format == "TIFF":
        (bits,) = tags.get(_BITS_PER_SAMPLE, (16,))
        return int((1 << bits) - 1)
    if (opened.mode.startswith("I;16") and opened.format in ("PNG", "JPEG2000")) or (
        opened.mode == "I" and opened.format in ("PNG", "PPM")
    ):
        return 0xFFFF  # which Pillow scales those of fewer bits to
    return None


def attempt(file: Source, crop: Crop) -> Picture | Unreadable:
    """A picture by Pillow, or why there is none."""
    try:
        return Picture(file, decode(file, crop))
    except FileNotFoundError:
        return Unreadable(file, "there is no such file")
    except Image.UnidentifiedImageError:
        return Unreadable(file, "not an image of a kind that Pillow knows")
    except Image.DecompressionBombError:
        return Unreadable(file, f"it has more than {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels")
    except (
        Exception
    ) as error:  # decoders raise all sorts of things over damaged files, and the others shall go on
        return Unreadable(file, _why(error))


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
