"""Read a dataset by name: a folder of images, files of arrays, CIFAR-10, or `synthetic`."""

from __future__ import annotations

import pathlib
from contextlib import closing

import torch

from escalade.errors import UnsupportedError
from escalade.terminal_text import counted, printable
from escalade_apps.classify.images import SUFFIXES, Crop, Unreadable, find
from escalade_apps.classify.reading import decode_all
from escalade_apps.train.data import arrays, cifar, synthetic
from escalade_apps.train.data.images import Dataset, Images, split

_TRAINING, _TESTING = ("train", "training"), ("test", "testing", "val", "valid", "validation")
_AHEAD = 64
SYNTHETIC = "synthetic"
_SYNTHETIC_IMAGES = 10_000
_SUPPORTED = (
    "CIFAR-10 (binary or Python version, unpacked), IDX files (train-images-idx3-ubyte etc.), a folder of images (one "
    "folder per class), NumPy's .npz with x and y, and synthetic, optionally with a count (synthetic:50000)"
)


def read(where: str, *, side: int, held_out: float, seed: int) -> Dataset:
    """Read the dataset `where`. `side` is the size of images that come in any size."""
    if where.partition(":")[0] == SYNTHETIC:
        return _synthetic(where, side, seed)
    path = pathlib.Path(where)
    if path.is_file():
        if path.suffix != ".npz":
            raise UnsupportedError(f"{printable(path)} is not a supported file; supported are {_SUPPORTED}")
        return split(printable(path), arrays.read_npz(path), held_out, seed)
    if not path.is_dir():
        raise UnsupportedError(f"{printable(path)} does not exist; supported are {_SUPPORTED}")
    for name, reader, pattern in (
        ("cifar-10-batches-bin", cifar.read_binary, "*_batch*.bin"),
        ("cifar-10-batches-py", cifar.read_pickled, "*_batch*[0-9h]"),
    ):
        for folder in (path, path / name):
            if any(folder.glob(pattern)):
                train, test = reader(folder, cifar.TRAINING), reader(folder, cifar.TESTING)
                return Dataset(printable(path), train, test)
    if arrays.find_idx(path, "train", "images"):
        return _idx(path)
    return _folder(path, side, held_out, seed)


def _synthetic(where: str, side: int, seed: int) -> Dataset:
    _, colon, count = where.partition(":")
    if colon and not (count.isdecimal() and int(count)):
        raise UnsupportedError(
            f"{where!r}: the count of synthetic images must be positive, as in synthetic:50000"
        )
    images = int(count) if colon else _SYNTHETIC_IMAGES
    tests = max(synthetic.CLASSES, images // 10)
    return Dataset(
        SYNTHETIC,
        synthetic.make(images, side, seed, "train"),
        synthetic.make(tests, side, seed, "test"),
    )


def _idx(folder: pathlib.Path) -> Dataset:
    found = {
        (part, kind): arrays.find_idx(folder, part, kind)
        for part in ("train", "t10k")
        for kind in ("images", "labels")
    }
    paths = {key: path for key, path in found.items() if path is not None}
    for part, kind in found:
        if (part, kind) not in paths:
            raise UnsupportedError(f"{printable(folder)} has IDX files, but no {part}-{kind}")
    train = arrays.read_idx(paths["train", "images"], paths["train", "labels"])
    test = arrays.read_idx(paths["t10k", "images"], paths["t10k", "labels"])
    return Dataset(printable(folder), train, test)


def _folder(path: pathlib.Path, side: int, held_out: float, seed: int) -> Dataset:
    if not _holds_images(path):
        raise UnsupportedError(f"{printable(path)} is not a dataset; supported are {_SUPPORTED}")
    train, test = _part(path, _TRAINING), _part(path, _TESTING)
    classes = _classes_of(train or path)
    if train and test:
        return Dataset(printable(path), _read_images(train, side, classes), _read_images(test, side, classes))
    return split(printable(path), _read_images(train or path, side, classes), held_out, seed)


def _part(folder: pathlib.Path, names: tuple[str, ...]) -> pathlib.Path | None:
    """Return the subfolder of one of these names, or None."""
    return next((folder / name for name in names if (folder / name).is_dir()), None)


def _holds_images(folder: pathlib.Path) -> bool:
    return any(path.suffix.lower() in SUFFIXES for path in folder.rglob("*"))


def _classes_of(folder: pathlib.Path) -> tuple[str, ...]:
    """Return the sorted names of the folders with images, one class each; empty if there are images beside them."""
    if any(path.suffix.lower() in SUFFIXES for path in folder.iterdir() if path.is_file()):
        return ()
    return tuple(sorted(path.name for path in folder.iterdir() if path.is_dir() and _holds_images(path)))


def _read_images(folder: pathlib.Path, side: int, classes: tuple[str, ...]) -> Images:
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
            f"first one {printable(unreadable[0].file)}: {printable(unreadable[0].reason)}"
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
