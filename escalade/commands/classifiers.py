"""Compile the classifier that the options of `escalade classify` describe."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

from escalade.commands.networks import is_saved
from escalade.commands.networks import network as named_network
from escalade.engine import Engine
from escalade.errors import UnsupportedError
from escalade.models import read_resnet
from escalade.ops.base.dtypes import QUANTIZED
from escalade.terminal_text import printable
from escalade_apps.classify.images import Crop, Source
from escalade_apps.classify.labels import class_labels
from escalade_apps.classify.preparation import (
    Color,
    classes_of,
    compile_classifier,
    crop_of,
    crop_to,
    normalization,
    normalization_at,
    side_of,
)


@dataclass(frozen=True)
class ClassifierRequest:
    """Weights of a ResNet or name of a network, file of labels, and compile options."""

    weights: pathlib.Path | None
    network: str | None
    labels: pathlib.Path | None
    dtype: str | None
    mean: Color | None
    std: Color | None

    @property
    def title(self) -> str:
        return printable(self.weights or self.network)


@dataclass(frozen=True)
class CompiledClassifier:
    """Engine with the name of its network, its crop and its class labels."""

    engine: Engine
    title: str
    crop: Crop
    labels: list[str]


def build_classifier(
    request: ClassifierRequest, device: str, batch: int, files: Sequence[Source]
) -> CompiledClassifier:
    """Compile the requested classifier. FP8 and INT8 are calibrated with `files`."""
    if request.weights is not None:
        model = read_resnet(request.weights)
        names = class_labels(model.fc.out_features, request.labels)
        normalize = normalization(model, request.mean, request.std)
        engine = compile_classifier(model, request.dtype or "fp16", device, batch, normalize, files)
        return CompiledClassifier(engine, f"ResNet-{model.layers}", crop_of(model), names)
    assert request.network is not None
    if is_saved(request.network) and (request.mean is not None or request.std is not None):
        raise UnsupportedError(
            f"{request.network} was saved with its own mean and standard deviation; leave out --mean and --std"
        )
    if request.dtype in QUANTIZED:
        raise UnsupportedError(
            f"--dtype {request.dtype} needs --weights, or an engine that was saved in {request.dtype}"
        )
    engine, _ = named_network(
        request.network, batch, request.dtype, device,
        normalize=lambda shape: normalization_at(side_of(shape), request.mean, request.std),
    )  # fmt: skip
    names = class_labels(classes_of(engine), request.labels)
    return CompiledClassifier(
        engine, printable(request.network), crop_to(side_of(engine.graph.inputs[0].shape)), names
    )
