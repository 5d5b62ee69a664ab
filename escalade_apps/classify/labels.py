"""Class labels from a file, or ImageNet's from torchvision."""

from __future__ import annotations

import importlib
import pathlib

from escalade import files, parsing
from escalade.errors import UnsupportedError
from escalade.terminal_text import printable

IMAGENET_CLASSES = 1000


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
            f"{printable(file)} has {len(found)} labels; the network has {classes} classes"
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
