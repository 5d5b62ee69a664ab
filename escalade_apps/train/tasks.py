"""Training tasks: a network, its loss, and default settings."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from escalade.errors import UnsupportedError
from escalade.models import ConvAutoencoder, load_autoencoder, load_resnet
from escalade.models.resnet import BasicBlock, ResNet
from escalade.models.weight_files import read_tensors
from escalade_apps.train.batches import Normalization
from escalade_apps.train.data.images import Images
from escalade_apps.train.settings import Settings

SMALL_IMAGES = 64
"""Up to this many rows and columns a ResNet gets CIFAR's stem, above it ImageNet's."""
_IMAGENET = Normalization((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_PLAIN = Normalization()


@dataclass(frozen=True)
class Task:
    """Network to train. `loss` takes its output and the target."""

    name: str
    make: Callable[[Settings, Images], nn.Module]
    load: Callable[[nn.Module, pathlib.Path], None]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    reconstructs: bool
    """True if the target is the input images, False if it is their labels."""
    normalization: Callable[[Images], Normalization]
    defaults: Mapping[str, Any]

    def target(self, images: torch.Tensor, labels: torch.Tensor | None) -> torch.Tensor:
        if self.reconstructs:
            return images
        assert labels is not None, "`make` rejects unlabeled images for a classifier"
        return labels


def mean_squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), target)


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.float(), target)


def _autoencoder(settings: Settings, images: Images) -> nn.Module:
    rows, columns = images.pixels.shape[1:3]
    if rows % 4 or columns % 4:
        raise UnsupportedError(
            f"images of {rows} x {columns}: the autoencoder halves both sides twice, so they must be multiples of 4"
        )
    return ConvAutoencoder(settings.width)


def _load_autoencoder(model: nn.Module, path: pathlib.Path) -> None:
    assert isinstance(model, ConvAutoencoder)
    if path.suffix == ".bin":
        model.load_state_dict(load_autoencoder(path, model.width).state_dict())
        return
    state = read_tensors(path)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UnsupportedError(
            f"{path.name} cannot be read as this autoencoder's weights: {reason}"
        ) from error


def _resnet18(settings: Settings, images: Images) -> nn.Module:
    if images.labels is None:
        raise UnsupportedError(
            f"resnet18 needs labels, and {settings.data} has none; in a folder of images, put each class in a folder "
            "of its own"
        )
    small = max(images.pixels.shape[1:3]) <= SMALL_IMAGES
    return ResNet(BasicBlock, (2, 2, 2, 2), images.classes, small, settings.width)


def _load_resnet18(model: nn.Module, path: pathlib.Path) -> None:
    assert isinstance(model, ResNet)
    load_resnet(model, path)


def _resnet_normalization(images: Images) -> Normalization:
    """Return the normalization that `escalade classify` uses for the same stem."""
    return _PLAIN if max(images.pixels.shape[1:3]) <= SMALL_IMAGES else _IMAGENET


_COMMON = {"data": "synthetic", "batch": 256, "seed": 0, "side": 32, "held_out": 0.1}
TASKS = {
    task.name: task
    for task in (
        Task(
            "autoencoder", _autoencoder, _load_autoencoder, mean_squared_error, True, lambda images: _PLAIN,
            _COMMON | {
                "epochs": 20, "lr": 1e-3, "optimizer": "adam", "schedule": "constant", "weight_decay": 0.0,
                "width": 256, "flip": False, "shift": 0,
            },
        ),
        Task(
            "resnet18", _resnet18, _load_resnet18, cross_entropy, False, _resnet_normalization,
            _COMMON | {
                "epochs": 20, "lr": 0.1, "optimizer": "sgd", "schedule": "cosine", "weight_decay": 5e-4,
                "width": 64, "flip": True, "shift": 4,
            },
        ),
    )
}  # fmt: skip


def task_of(name: str) -> Task:
    if name not in TASKS:
        raise UnsupportedError(f"task {name!r}: supported are {', '.join(TASKS)}")
    return TASKS[name]


def settings(name: str, given: Mapping[str, Any], device: torch.device) -> Settings:
    """Return the settings of a new run: `given`, and defaults of the task and the device."""
    dtype = "fp16" if device.type == "cuda" else "fp32"
    return Settings(**({"task": name, "dtype": dtype, **task_of(name).defaults} | dict(given)))
