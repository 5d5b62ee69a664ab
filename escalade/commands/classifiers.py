"""The network that images are classified by: what was asked for, and the engine that comes of it."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

from escalade.commands.networks import is_saved
from escalade.commands.networks import network as named_network
from escalade.engine import Engine
from escalade.errors import UnsupportedError
from escalade.models import read_resnet
from escalade.terminal_text import printable
from escalade_apps.classify.images import Crop, Source
from escalade_apps.classify.labels import class_labels
from escalade_apps.classify.preparation import (
    Colour,
    classes_of,
    compiled,
    crop_of,
    crop_to,
    normalization,
    normalization_at,
    side_of,
)


@dataclass(frozen=True)
class Asked:
    """A ResNet's weights or the name of a network, the file of its classes' names, and how it is to be compiled."""

    weights: pathlib.Path | None
    network: str | None
    labels: pathlib.Path | None
    dtype: str | None
    mean: Colour | None
    std: Colour | None

    @property
    def called(self) -> str:
        return printable(self.weights or self.network)


@dataclass(frozen=True)
class Classifier:
    """An engine, what its network is called, what it wants of images, and what its classes are called."""

    engine: Engine
    title: str
    crop: Crop
    labels: list[str]


def classifier(asked: Asked, device: str, batch: int, files: Sequence[Source]) -> Classifier:
    """Compiles what was asked for; the files are those that FP8's ranges are of."""
    if asked.weights is not None:
        model = read_resnet(asked.weights)
        names = class_labels(model.fc.out_features, asked.labels)
        normalize = normalization(model, asked.mean, asked.std)
        engine = compiled(model, asked.dtype or "fp16", device, batch, normalize, files)
        return Classifier(engine, f"ResNet-{model.layers}", crop_of(model), names)
    assert asked.network is not None
    if is_saved(asked.network) and (asked.mean is not None or asked.std is not None):
        raise UnsupportedError(f"{asked.network} was saved with its own mean and standard deviation")
    if asked.dtype == "fp8":
        raise UnsupportedError("fp8 is for --weights, and for engines that were saved in it")
    engine, _ = named_network(
        asked.network, batch, asked.dtype, device,
        normalize=lambda shape: normalization_at(side_of(shape), asked.mean, asked.std),
    )  # fmt: skip
    names = class_labels(classes_of(engine), asked.labels)
    return Classifier(engine, printable(asked.network), crop_to(side_of(engine.graph.inputs[0].shape)), names)
