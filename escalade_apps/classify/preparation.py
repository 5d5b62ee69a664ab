"""Crop, normalization and engine for a classifier that takes images as bytes."""

from __future__ import annotations

from collections.abc import Sequence

from escalade.engine import Engine, compile
from escalade.engine.nodes.convert import Normalize
from escalade.errors import UnsupportedError
from escalade.models import ResNet
from escalade.ops.base.dtypes import QUANTIZED
from escalade.terminal_text import counted
from escalade_apps.classify.images import Crop, Source
from escalade_apps.classify.prediction import example, first_images

Color = tuple[float, float, float]
Normalization = tuple[Color, Color]
_IMAGENET_CROP, _CIFAR_CROP = Crop(256, 224), Crop(32, 32)
_SMALL = 64
"""Images up to this side are resized without a margin to crop, like CIFAR's."""
_IMAGENET: Normalization = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_PLAIN: Normalization = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


def crop_of(model: ResNet) -> Crop:
    return _CIFAR_CROP if model.small_images else _IMAGENET_CROP


def normalization(model: ResNet, mean: Color | None = None, std: Color | None = None) -> Normalization:
    return _normalization(model.small_images, mean, std)


def crop_to(side: int) -> Crop:
    """Return the crop for a network input of `side` pixels, with ImageNet's margin unless it is small."""
    if side <= _SMALL:
        return Crop(side, side)
    return Crop(side * _IMAGENET_CROP.resize // _IMAGENET_CROP.side, side)


def normalization_at(side: int, mean: Color | None = None, std: Color | None = None) -> Normalization:
    """Fill in the default mean and std of a network with inputs of `side` pixels."""
    return _normalization(side <= _SMALL, mean, std)


def _normalization(is_small: bool, mean: Color | None, std: Color | None) -> Normalization:
    # There is no common default for small images, so they are not normalized.
    default_mean, default_std = _PLAIN if is_small else _IMAGENET
    return mean or default_mean, std or default_std


def side_of(shape: Sequence[object]) -> int:
    """Return the side of an input shape [batch, 3, side, side]. Raises UnsupportedError for any other shape."""
    if len(shape) != 4 or shape[1] != 3 or shape[2] != shape[3] or not isinstance(shape[3], int):
        sizes = ", ".join("batch" if number == 0 else str(size) for number, size in enumerate(shape))
        raise UnsupportedError(f"the network takes inputs of [{sizes}]; images are [batch, 3, side, side]")
    return shape[3]


def classes_of(engine: Engine) -> int:
    """Return the number of classes. Raises UnsupportedError unless the engine is a classifier of images as bytes."""
    graph = engine.graph
    if len(graph.inputs) != 1 or len(graph.outputs) != 1:
        raise UnsupportedError(
            f"the network has {counted(len(graph.inputs), 'input')} and {counted(len(graph.outputs), 'output')}; a "
            "classifier has one input, "
            "images, and one output, a row of logits per image"
        )
    shape = graph.shape_of(graph.outputs[0])
    if len(shape) != 2 or not isinstance(shape[1], int):
        raise UnsupportedError(
            f"the output of the network has {counted(len(shape), 'dimension')}; a classifier's is [batch, classes]"
        )
    if not any(Normalize.matches(node) for node in graph):
        raise UnsupportedError(
            "the engine was compiled without normalize=(mean, std), so it does not take images as bytes; compile or "
            "build it again with normalize"
        )
    return shape[1]


def compile_classifier(
    model: ResNet,
    dtype: str,
    device: str,
    batch: int,
    normalize: Normalization,
    files: Sequence[Source],
) -> Engine:
    """Compile a ResNet for batches of bytes. FP8 and INT8 are calibrated with the first batch of `files`."""
    crop = crop_of(model)
    return compile(
        model,
        example(batch, crop),
        dtype=dtype,
        device=device,
        normalize=normalize,
        calibration=first_images(files, crop, batch) if dtype in QUANTIZED else None,
    )
