"""Folders whose images are labelled: a folder a class, or a class in front of each file's name."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from escalade.errors import UnsupportedError
from escalade.terminal_text import printable
from escalade_apps.classify.images import find
from escalade_apps.classify.labels import class_labels

FORMS = "a folder a class (dog/1.jpg), or files named CLASS_whatever (n02085936_1.jpg)"
_NAMED = 3


@dataclass(frozen=True)
class Labelled:
    """An image file and the number of its class."""

    file: pathlib.Path
    number: int


def find_labelled(folder: pathlib.Path, classes: int, names: pathlib.Path | None = None) -> list[Labelled]:
    """Every image under a folder with its class, in order.

    `names` is a file with what the network's classes are called here, in its order. Without it, what the images are
    labelled with are the classes' numbers, or are all `classes` of them, numbered in alphabetical order.
    """
    if not os.path.isdir(folder):
        raise UnsupportedError(f"{printable(folder)} is no folder; labelled images are {FORMS}")
    files, closed = find([folder])
    if closed:
        raise UnsupportedError(f"{printable(closed[0].file)}: {printable(closed[0].reason)}")
    labels = _labels(folder, files)
    numbers = _numbers(folder, labels, classes, names)
    return [Labelled(file, numbers[label]) for file, label in zip(files, labels, strict=True)]


def spread(images: Sequence[Labelled], limit: int | None) -> list[Labelled]:
    """At most so many of the images, evenly from all of them: the first would be of a few classes."""
    if limit is None or limit >= len(images):
        return list(images)
    return [images[place * len(images) // limit] for place in range(limit)]


def _labels(folder: pathlib.Path, files: Sequence[pathlib.Path]) -> list[str]:
    """What each file is labelled with: the folder right under `folder` that it is in, or how its name begins."""
    below = [file.relative_to(folder).parts for file in files]
    beside = [parts for parts in below if len(parts) == 1]
    if not beside:
        return [parts[0] for parts in below]
    if len(beside) != len(below):
        raise UnsupportedError(
            f"{printable(folder)} has images in folders and beside them, the first of these {printable(beside[0][0])}; "
            f"labelled images are {FORMS}, and not both"
        )
    unlabelled = next((name for (name,) in below if "_" not in name.lstrip("_")), None)
    if unlabelled is not None:
        raise UnsupportedError(
            f"{printable(unlabelled)} in {printable(folder)} has no class in front of its name; labelled images are "
            f"{FORMS}"
        )
    return [name.partition("_")[0] for (name,) in below]


def _numbers(
    folder: pathlib.Path, labels: Sequence[str], classes: int, names: pathlib.Path | None
) -> Mapping[str, int]:
    """The number of every label's class."""
    distinct = sorted(set(labels))
    if names is not None:
        called = class_labels(classes, names)
        repeated = [name for name in called if called.count(name) > 1] if len(set(called)) < classes else []
        if repeated:
            raise UnsupportedError(f"{printable(names)} has {printable(repeated[0])} more than once")
        known = {name: number for number, name in enumerate(called)}
    elif all(label.isascii() and label.isdecimal() for label in distinct):
        known = {label: int(label) for label in distinct if int(label) < classes}
    elif len(distinct) == classes:
        known = {label: number for number, label in enumerate(distinct)}
    else:
        raise UnsupportedError(
            f"the images in {printable(folder)} are of {len(distinct)} classes ({_few(distinct)}), and the network "
            f"knows {classes}: --classes FILE says which of them these are, with one name a line in the network's order"
        )
    strange = [label for label in distinct if label not in known]
    if strange:
        where = printable(names) if names is not None else f"the numbers of the network's {classes} classes"
        raise UnsupportedError(
            f"images in {printable(folder)} are labelled {_few(strange)}, which is not among {where}"
        )
    return known


def _few(labels: Sequence[str]) -> str:
    named = ", ".join(printable(label) for label in labels[:_NAMED])
    return named + (f" and {len(labels) - _NAMED} more" if len(labels) > _NAMED else "")
