"""What classes are called."""

from __future__ import annotations

import importlib
import pathlib

from escalade import files, parsing
from escalade.errors import UnsupportedError
from escalade.terminal_text import printable

IMAGENET_CLASSES = 1000


def class_labels(classes: int, file: pathlib.Path | None) -> list[str]:
    """The classes' names from a file: a `.json` list, or a line each.

    Without one ImageNet's where torchvision is at hand, else the classes' numbers.
    """
    if file is not None:
        return _read(file, classes)
    found = _torchvision() if classes == IMAGENET_CLASSES else None
    return found or [str(number) for number in range(classes)]


def _read(file: pathlib.Path, classes: int) -> list[str]:
    try:
        contents = files.read(file)
        if contents is None:
            raise FileNotFoundError("there is no such file")
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
            f"{printable(file)} has {len(found)} labels; the network has {classes} classes"
        )
    return found


def _json_list(file: pathlib.Path, text: str) -> list[str]:
    try:
        found = parsing.parse(text)
    except ValueError as error:
        raise UnsupportedError(f"{printable(file)} is not JSON: {error}") from error
    if not isinstance(found, list) or not all(isinstance(label, str) for label in found):
        raise UnsupportedError(f"{printable(file)}: labels are a list of strings in JSON")
    return found


def _torchvision() -> list[str] | None:
    """torchvision is no dependency, and one built for another PyTorch fails while it is imported."""
    try:
        models = importlib.import_module("torchvision.models")
        return list(models.ResNet18_Weights.IMAGENET1K_V1.meta["categories"])
    except (ImportError, RuntimeError, OSError, AttributeError):
        return None
