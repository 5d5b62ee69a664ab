"""Folders of image files, with one folder per class or without labels."""

from __future__ import annotations

import pathlib
from contextlib import closing

import torch

from escalade.errors import UnsupportedError
from escalade.terminal_text import counted, printable
from escalade_apps.classify.images import SUFFIXES, Crop, Unreadable, find
from escalade_apps.classify.reading import decode_all
from escalade_apps.train.data.images import Images

TRAINING, TESTING = ("train", "training"), ("test", "testing", "val", "valid", "validation")
_AHEAD = 64


def part(folder: pathlib.Path, names: tuple[str, ...]) -> pathlib.Path | None:
    """Return the subfolder of one of these names, or None."""
    return next((folder / name for name in names if (folder / name).is_dir()), None)


def holds_images(folder: pathlib.Path) -> bool:
    return any(path.suffix.lower() in SUFFIXES for path in folder.rglob("*"))


def classes_of(folder: pathlib.Path) -> tuple[str, ...]:
    """Return the sorted names of the folders with images, one class each; empty if there are images beside them."""
    if any(path.suffix.lower() in SUFFIXES for path in folder.iterdir() if path.is_file()):
        return ()
    return tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and holds_images(path)))


def read(folder: pathlib.Path, side: int, classes: tuple[str, ...]) -> Images:
    """Read every image under a folder, with its shorter side resized to `side` and cropped to the center square.

    Raises UnsupportedError if an image cannot be read, because skipping it would change the dataset.
    """
    files, unreadable = find([folder])
    labels: list[int] = []
    pixels = torch.empty(len(files), side, side, 3, dtype=torch.uint8)
    with closing(decode_all(files, Crop(side, side), _AHEAD)) as decoded:
        for index, each in enumerate(decoded):
            if isinstance(each, Unreadable):
                unreadable.append(each)
            else:
                pixels[index] = torch.from_numpy(each.pixels.copy())
                labels.append(_label(folder, files[index], classes))
    if unreadable:
        raise UnsupportedError(
            f"{len(unreadable)} of {counted(len(files), 'image')} under {printable(folder)} cannot be read, the "
            "first one "
            f"{printable(unreadable[0].file)}: {printable(unreadable[0].reason)}"
        )
    return Images(pixels, torch.tensor(labels) if classes else None, len(classes))


def _label(folder: pathlib.Path, file: pathlib.Path, classes: tuple[str, ...]) -> int:
    if not classes:
        return -1
    name = file.relative_to(folder).parts[0]
    if name not in classes:
        raise UnsupportedError(
            f"{printable(file)} is of class {printable(name)}, which has no training images"
        )
    return classes.index(name)
