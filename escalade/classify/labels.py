"""What classes are called."""

from __future__ import annotations

import importlib
import json
import pathlib

from escalade.errors import UnsupportedError

IMAGENET_CLASSES = 1000


def labels(classes: int, file: pathlib.Path | None) -> list[str]:
    """From a file: a `.json` list, or a line each.

    Without one ImageNet's where torchvision is at hand, else the classes' numbers.
    """
    if file is not None:
        return _read(file, classes)
    found = _torchvision() if classes == IMAGENET_CLASSES else None
    return found or [str(number) for number in range(classes)]


def _read(file: pathlib.Path, classes: int) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnsupportedError(f"{file} cannot be read as labels: {error}") from error
    found = (
        _json_list(file, text)
        if file.suffix == ".json"
        else [line.strip() for line in text.rstrip().splitlines()]
    )
    if len(found) != classes:
        raise UnsupportedError(f"{file} has {len(found)} labels; the network has {classes} classes")
    return found


def _json_list(file: pathlib.Path, text: str) -> list[str]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise UnsupportedError(f"{file} is not JSON: {error}") from error
    if not isinstance(found, list) or not all(isinstance(label, str) for label in found):
        raise UnsupportedError(f"{file}: labels are a list of strings in JSON")
    return found


def _torchvision() -> list[str] | None:
    """torchvision is no dependency, and one built for another PyTorch fails while it is imported."""
    try:
        models = importlib.import_module("torchvision.models")
        return list(models.ResNet18_Weights.IMAGENET1K_V1.meta["categories"])
    except (ImportError, RuntimeError, OSError, AttributeError):
        return None
