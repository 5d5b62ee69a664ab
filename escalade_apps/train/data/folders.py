"""Folders of image files: a folder a class, or images of no class."""

from __future__ import annotations

import pathlib
from contextlib import closing

import torch

from escalade.errors import UnsupportedError
from escalade.terminal_text import printable
from escalade_apps.classify.images import SUFFIXES, Crop, Unreadable, find
from escalade_apps.classify.reading import decode_all
from escalade_apps.train.data.images import Images

TRAINING, TESTING = ("train", "training"), ("test", "testing", "val", "valid", "validation")
_AHEAD = 64


def part(folder: pathlib.Path, names: tuple[str, ...]) -> pathlib.Path | None:
    """The folder of that part of a dataset, if it is divided."""
    return next((folder / name for name in names if (folder / name).is_dir()), None)


def holds_images(folder: pathlib.Path) -> bool:
    return any(path.suffix.lower() in SUFFIXES for path in folder.rglob("*"))


def classes_of(folder: pathlib.Path) -> tuple[str, ...]:
    """The names of the folders with images, in order: a class each. None where images lie beside them."""
    if any(path.suffix.lower() in SUFFIXES for path in folder.iterdir() if path.is_file()):
        return ()
    return tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and holds_images(path)))


def read(folder: pathlib.Path, side: int, classes: tuple[str, ...]) -> Images:
    """Every image under a folder, its shorter side resized to `side` and a square taken from the middle.

    An image that cannot be read is an error: a dataset with holes is another dataset.
    """
    files, closed = find([folder])
    labels: list[int] = []
    pixels = torch.empty(len(files), side, side, 3, dtype=torch.uint8)
    broken: list[Unreadable] = list(closed)
    with closing(decode_all(files, Crop(side, side), _AHEAD)) as decoded:
        for place, each in enumerate(decoded):
            if isinstance(each, Unreadable):
                broken.append(each)
            else:
                pixels[place] = torch.from_numpy(each.pixels.copy())
                labels.append(_label(folder, files[place], classes))
    if broken:
        raise UnsupportedError(
            f"{len(broken)} of {len(files)} images under {printable(folder)} cannot be read, the first of them "
            f"{printable(broken[0].file)}: {printable(broken[0].reason)}"
        )
    return Images(pixels, torch.tensor(labels) if classes else None, len(classes))


def _label(folder: pathlib.Path, file: pathlib.Path, classes: tuple[str, ...]) -> int:
    if not classes:
        return -1
    name = file.relative_to(folder).parts[0]
    if name not in classes:
        raise UnsupportedError(f"{printable(file)} is of a class that there is no other image of to train on")
    return classes.index(name)
