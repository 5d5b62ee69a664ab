"""Read networks from folders in Hugging Face's layout: config.json beside weights, of timm or of transformers."""

from __future__ import annotations

import importlib
import os
import pathlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from escalade import parsing
from escalade.errors import UnsupportedError
from escalade.models.weight_files import load_weights, read_tensors
from escalade.terminal_text import first_line, printable

CONFIG = "config.json"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_PREPROCESSOR = "preprocessor_config.json"
_IMAGE = (3, 224, 224)
_SIZE_KEYS = ("height", "shortest_edge")
"""Keys of an image size in transformers' configurations."""


def read_folder(path: str | os.PathLike[str]) -> tuple[nn.Module, torch.Tensor]:
    """Return the network of a folder with its weights, in evaluation mode, and an input of batch size 1.

    No code from the folder is run: weights are read as tensors, and the library that wrote it makes the network.
    """
    folder = pathlib.Path(path)
    config = _json(folder / CONFIG)
    if isinstance(config.get("architecture"), str):
        model, item = _from_timm(folder, config)
    elif isinstance(config.get("architectures"), list) and config["architectures"]:
        model, item = _from_transformers(folder, config)
    else:
        raise UnsupportedError(
            f"{printable(folder / CONFIG)} names no network: timm's has the key architecture, transformers' the key "
            "architectures"
        )
    return model.eval(), torch.randn(1, *item, generator=torch.Generator().manual_seed(0), device="cpu")


def _from_timm(folder: pathlib.Path, config: Mapping[str, Any]) -> tuple[nn.Module, tuple[int, ...]]:
    timm = _library("timm", folder)
    arguments = dict(config.get("model_args") or {})
    if "num_classes" in config:
        arguments.setdefault("num_classes", config["num_classes"])
    try:
        model = timm.create_model(config["architecture"], pretrained=False, **arguments)
    except Exception as error:  # timm raises exceptions of many types for unknown names and arguments
        raise UnsupportedError(
            f"timm {timm.__version__} cannot make {printable(config['architecture'])!r} as "
            f"{printable(folder / CONFIG)} describes it: {first_line(error)}"
        ) from error
    weights = next((file for name in _WEIGHTS if (file := folder / name).is_file()), None)
    if weights is None:
        raise UnsupportedError(f"{printable(folder)} has no weights: expected {' or '.join(_WEIGHTS)}")
    load_weights(model, read_tensors(weights), printable(weights))
    size = (config.get("pretrained_cfg") or {}).get("input_size") or model.default_cfg.get(
        "input_size", _IMAGE
    )
    return model, tuple(size)


def _from_transformers(folder: pathlib.Path, config: Mapping[str, Any]) -> tuple[nn.Module, tuple[int, ...]]:
    transformers = _library("transformers", folder)
    name = config["architectures"][0]
    kind = getattr(transformers, str(name), None)
    if kind is None or not hasattr(kind, "from_pretrained"):
        raise UnsupportedError(
            f"transformers {transformers.__version__} has no network {printable(str(name))!r}"
        )
    try:
        model = kind.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise UnsupportedError(
            f"transformers cannot read {printable(folder)}: {first_line(error)}"
        ) from error
    channels = config.get("num_channels", _IMAGE[0])
    return model, (channels, *_image_size(folder, config))


def _image_size(folder: pathlib.Path, config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the rows and columns that a network of transformers' takes."""
    processor = _json(folder / _PREPROCESSOR) if (folder / _PREPROCESSOR).is_file() else {}
    for size in (config.get("image_size"), processor.get("crop_size"), processor.get("size")):
        if isinstance(size, Mapping):
            side = next((size[key] for key in _SIZE_KEYS if key in size), None)
            size = None if side is None else (side, size.get("width", side))
        if isinstance(size, int):
            return size, size
        if isinstance(size, list | tuple) and len(size) == 2:
            return int(size[0]), int(size[1])
    return _IMAGE[1], _IMAGE[2]


def _library(name: str, folder: pathlib.Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedError(
            f"{printable(folder)} holds a network of {name}, which makes it but cannot be imported here "
            f"({first_line(error)}); pip install {name}"
        ) from error


def _json(file: pathlib.Path) -> dict[str, Any]:
    if not file.is_file():
        raise UnsupportedError(
            f"{printable(file.parent)} is a folder without {file.name}; a folder of a network has it beside "
            f"{_WEIGHTS[0]}"
        )
    try:
        found = parsing.parse_unique(file.read_text())
    except (OSError, ValueError) as error:
        raise UnsupportedError(f"{printable(file)} cannot be read: {first_line(error)}") from error
    if not isinstance(found, dict):
        raise UnsupportedError(f"{printable(file)} is not a JSON object")
    return found
