"""Read a dataset by name: a folder, a file, or `synthetic`."""

from __future__ import annotations

import pathlib

from escalade.errors import UnsupportedError
from escalade.terminal_text import printable
from escalade_apps.train.data import arrays, cifar, folders, synthetic
from escalade_apps.train.data.images import Dataset, split

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
    if not folders.holds_images(path):
        raise UnsupportedError(f"{printable(path)} is not a dataset; supported are {_SUPPORTED}")
    train, test = folders.part(path, folders.TRAINING), folders.part(path, folders.TESTING)
    classes = folders.classes_of(train or path)
    if train and test:
        return Dataset(printable(path), folders.read(train, side, classes), folders.read(test, side, classes))
    return split(printable(path), folders.read(train or path, side, classes), held_out, seed)
