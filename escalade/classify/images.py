"""Image files: which there are, and their pixels as classifiers want them."""

from __future__ import annotations

import math
import os
import pathlib
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps

from escalade.errors import UnsupportedError

SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""What is taken from a folder; a file that is named is tried whatever it is called."""


@dataclass(frozen=True)
class Unreadable:
    """An image that was passed over, and why."""

    file: pathlib.Path
    reason: str


@dataclass(frozen=True)
class Picture:
    """A decoded image: `pixels` is [side, side, 3], uint8."""

    file: pathlib.Path
    pixels: np.ndarray


@dataclass(frozen=True)
class Crop:
    """The shorter side is resized to `resize`, and a square of `side` taken from the middle."""

    resize: int
    side: int


def find(paths: Sequence[pathlib.Path]) -> list[pathlib.Path]:
    """Files as they are, folders as the images under them, in order."""
    found: list[pathlib.Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(
                file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file()
            )
        else:
            found.append(path)
    if not found:
        folders = ", ".join(str(path) for path in paths)
        raise UnsupportedError(
            f"there are no images in {folders}; files that end in {' '.join(SUFFIXES)} are taken"
        )
    return found


def decode(file: pathlib.Path, crop: Crop) -> np.ndarray:
    """Upright as its EXIF tag says, RGB, resized with antialiasing and cropped: torchvision's way with PIL images."""
    with Image.open(file) as opened:
        image = ImageOps.exif_transpose(opened).convert("RGB")
    shorter = min(image.size)
    if shorter != crop.resize:
        width, height = (int(crop.resize * length / shorter) for length in image.size)
        if width * height > (Image.MAX_IMAGE_PIXELS or math.inf):
            raise ValueError(
                f"{image.width} x {image.height} pixels become {width} x {height}, more than Pillow takes"
            )
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = (round((length - crop.side) / 2) for length in image.size)
    return np.asarray(image.crop((left, top, left + crop.side, top + crop.side)))


def decode_all(
    files: Iterable[pathlib.Path], crop: Crop, ahead: int
) -> Generator[Picture | Unreadable, None, None]:
    """In order, decoded by a thread for each core, at most `ahead` images before they are asked for."""
    workers = len(os.sched_getaffinity(0))
    waiting: deque[Future[Picture | Unreadable]] = deque()
    pool = ThreadPoolExecutor(workers, "escalade-decode")
    try:
        for file in files:
            waiting.append(pool.submit(_try, file, crop))
            if len(waiting) >= max(ahead, workers):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _try(file: pathlib.Path, crop: Crop) -> Picture | Unreadable:
    try:
        return Picture(file, decode(file, crop))
    except FileNotFoundError:
        return Unreadable(file, "there is no such file")
    except Image.UnidentifiedImageError:
        return Unreadable(file, "not an image of a kind that Pillow knows")
    except (
        Exception
    ) as error:  # decoders raise all sorts of things over damaged files, and the others shall go on
        return Unreadable(file, str(error) or type(error).__name__)
