"""What a network wants of image files: which crop, which normalisation, and an engine that takes their bytes."""

from __future__ import annotations

from collections.abc import Sequence

from escalade.engine import Engine, compile
from escalade.engine.nodes import operator_of
from escalade.errors import UnsupportedError
from escalade.models import ResNet
from escalade_apps.classify.images import Crop, Source
from escalade_apps.classify.prediction import example, first_images

Colour = tuple[float, float, float]
Normalization = tuple[Colour, Colour]
_PHOTOGRAPHS, _SMALL_IMAGES = Crop(256, 224), Crop(32, 32)
"""The crops for ImageNet's stem and for CIFAR's."""
_SMALL = 64
"""The side up to which images are taken as they are, as CIFAR's."""
_IMAGENET: Normalization = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_PLAIN: Normalization = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)


def crop_of(model: ResNet) -> Crop:
    return _SMALL_IMAGES if model.small_images else _PHOTOGRAPHS


def normalization(model: ResNet, mean: Colour | None = None, std: Colour | None = None) -> Normalization:
    """What was given, else ImageNet's; none for small images, whose networks differ in it."""
    usual_mean, usual_std = _PLAIN if model.small_images else _IMAGENET
    return mean or usual_mean, std or usual_std


def crop_to(side: int) -> Crop:
    """The crop for images of a side: of photographs the middle, as for ImageNet's."""
    return Crop(side, side) if side <= _SMALL else Crop(side * _PHOTOGRAPHS.resize // _PHOTOGRAPHS.side, side)


def normalization_at(side: int, mean: Colour | None = None, std: Colour | None = None) -> Normalization:
    """What was given, else ImageNet's; none for small images, whose networks differ in it."""
    usual_mean, usual_std = _PLAIN if side <= _SMALL else _IMAGENET
    return mean or usual_mean, std or usual_std


def side_of(shape: Sequence[object]) -> int:
    """The side of the square images of three colours that an input of that shape is."""
    if len(shape) != 4 or shape[1] != 3 or shape[2] != shape[3] or not isinstance(shape[3], int):
        sizes = ", ".join("batch" if number == 0 else str(size) for number, size in enumerate(shape))
        raise UnsupportedError(f"the network takes [{sizes}]; images are [batch, 3, side, side]")
    return shape[3]


def classes_of(engine: Engine) -> int:
    """The classes of a network of one image and one result that takes images as bytes."""
    graph = engine.graph
    if len(graph.inputs) != 1 or len(graph.outputs) != 1:
        raise UnsupportedError(
            f"the network takes {len(graph.inputs)} tensors and gives {len(graph.outputs)}; one that classifies takes "
            "images and gives a row of numbers for each"
        )
    shape = graph.shape_of(graph.outputs[0])
    if len(shape) != 2 or not isinstance(shape[1], int):
        raise UnsupportedError(
            f"the network gives {len(shape)} dimensions; of classes it gives a row for each image"
        )
    if not any(operator_of(node).is_image_scaling for node in graph):
        raise UnsupportedError(
            "the engine was compiled without normalize=(mean, std), so it takes no images as bytes: compile or build "
            "it again with it"
        )
    return shape[1]


def compiled(
    model: ResNet,
    dtype: str,
    device: str,
    batch: int,
    normalize: Normalization,
    files: Sequence[Source],
) -> Engine:
    """An engine for batches of bytes; FP8's ranges are those of the first of the files."""
    crop = crop_of(model)
    return compile(
        model,
        example(batch, crop),
        dtype=dtype,
        device=device,
        normalize=normalize,
        calibration=first_images(files, crop, batch) if dtype == "fp8" else None,
    )
