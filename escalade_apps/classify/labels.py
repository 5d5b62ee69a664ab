"""Class labels: names from a file or of ImageNet, and folders of images with labels."""

from __future__ import annotations

import importlib
import os
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from escalade import files, parsing
from escalade.errors import UnsupportedError
from escalade.terminal_text import counted, printable
from escalade_apps.classify.images import find

IMAGENET_CLASSES = 1000
LAYOUTS = "one folder per class (dog/1.jpg), or files named CLASS_anything (n02085936_1.jpg)"
_SHOWN = 3
"""Labels listed in an error message."""


def class_labels(classes: int, file: pathlib.Path | None) -> list[str]:
    """Read class labels from a file: a `.json` list, or one label per line.

    Without a file, return ImageNet's labels if there are 1000 classes and torchvision is installed, else class numbers.
    """
    if file is not None:
        return _read(file, classes)
    found = _imagenet_labels() if classes == IMAGENET_CLASSES else None
    return found or [str(number) for number in range(classes)]


def _read(file: pathlib.Path, classes: int) -> list[str]:
    try:
        contents = files.read(file)
        if contents is None:
            raise FileNotFoundError("no such file")
        text = contents.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UnsupportedError(f"{printable(file)} cannot be read as labels: {error}") from error
    found = (
        _json_list(file, text)
        if file.suffix == ".json"
        else [line.strip() for line in text.rstrip().splitlines()]
    )
    if len(found) != classes:
        raise UnsupportedError(
            f"{printable(file)} has {counted(len(found), 'label')}; the network has {counted(classes, 'class')}"
        )
    return found


def _json_list(file: pathlib.Path, text: str) -> list[str]:
    try:
        found = parsing.parse(text)
    except ValueError as error:
        raise UnsupportedError(f"{printable(file)} is not JSON: {error}") from error
    if not isinstance(found, list) or not all(isinstance(label, str) for label in found):
        raise UnsupportedError(f"{printable(file)}: labels in JSON must be a list of strings")
    return found


def _imagenet_labels() -> list[str] | None:
    try:  # torchvision is optional, and fails to import if it was built for another PyTorch
        models = importlib.import_module("torchvision.models")
        return list(models.ResNet18_Weights.IMAGENET1K_V1.meta["categories"])
    except (ImportError, RuntimeError, OSError, AttributeError):
        return None


@dataclass(frozen=True)
class LabeledImage:
    """Image file and the index of its class."""

    file: pathlib.Path
    number: int


def find_labeled(folder: pathlib.Path, classes: int, names: pathlib.Path | None = None) -> list[LabeledImage]:
    """Return every image under a folder with its class, in order.

    `names` is a file with the labels used in the folder, in the network's class order. Without it, labels must be class
    indices, or name all `classes` classes, which are then numbered alphabetically.
    """
    if not os.path.isdir(folder):
        raise UnsupportedError(f"{printable(folder)} is not a folder; labeled images are {LAYOUTS}")
    files, unreadable = find([folder])
    if unreadable:
        raise UnsupportedError(f"{printable(unreadable[0].file)}: {printable(unreadable[0].reason)}")
    labels = _labels(folder, files)
    numbers = _numbers(folder, labels, classes, names)
    return [LabeledImage(file, numbers[label]) for file, label in zip(files, labels, strict=True)]


def spread(images: Sequence[LabeledImage], limit: int | None) -> list[LabeledImage]:
    """Return at most `limit` images, evenly spaced: the first `limit` would cover only a few classes."""
    if limit is None or limit >= len(images):
        return list(images)
    return [images[position * len(images) // limit] for position in range(limit)]


def _labels(folder: pathlib.Path, files: Sequence[pathlib.Path]) -> list[str]:
    """Return the label of each file: the name of its top-level folder, or the prefix of the file name."""
    relative = [file.relative_to(folder).parts for file in files]
    top_level = [parts for parts in relative if len(parts) == 1]
    if not top_level:
        return [parts[0] for parts in relative]
    if len(top_level) != len(relative):
        raise UnsupportedError(
            f"{printable(folder)} has images both in folders and outside of them, such as "
            f"{printable(top_level[0][0])}; labeled images are {LAYOUTS}, not both"
        )
    unlabeled = next((name for (name,) in relative if "_" not in name.lstrip("_")), None)
    if unlabeled is not None:
        raise UnsupportedError(
            f"{printable(unlabeled)} in {printable(folder)} has no class prefix; labeled images are {LAYOUTS}"
        )
    return [name.partition("_")[0] for (name,) in relative]


def _numbers(
    folder: pathlib.Path, labels: Sequence[str], classes: int, names: pathlib.Path | None
) -> Mapping[str, int]:
    """Return the class index of every label."""
    distinct = sorted(set(labels))
    if names is not None:
        called = class_labels(classes, names)
        repeated = [name for name in called if called.count(name) > 1] if len(set(called)) < classes else []
        if repeated:
            raise UnsupportedError(f"{printable(names)} contains {printable(repeated[0])} more than once")
        known = {name: number for number, name in enumerate(called)}
    elif all(label.isascii() and label.isdecimal() for label in distinct):
        known = {label: int(label) for label in distinct if int(label) < classes}
    elif len(distinct) == classes:
        known = {label: number for number, label in enumerate(distinct)}
    else:
        raise UnsupportedError(
            f"the images in {printable(folder)} have {counted(len(distinct), 'class')} ({_few(distinct)}), and the "
            f"network has {classes}; pass --classes FILE with one name per line in the network's class order"
        )
    unknown = [label for label in distinct if label not in known]
    if unknown:
        where = printable(names) if names is not None else f"the indices of the network's {classes} classes"
        raise UnsupportedError(
            f"images in {printable(folder)} are labeled {_few(unknown)}, which is not in {where}"
        )
    return known


def _few(labels: Sequence[str]) -> str:
    listed = ", ".join(printable(label) for label in labels[:_SHOWN])
    return listed + (f" and {len(labels) - _SHOWN} more" if len(labels) > _SHOWN else "")
