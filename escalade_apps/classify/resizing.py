"""Decoded photographs of any sizes resized and cropped on their device by one launch, to the bit as Pillow does it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import PIL
import torch

from escalade.device.program import Program
from escalade.device.recipe import Buffer, KernelCall, Recipe
from escalade.device.run import TwinOptions, bind
from escalade_apps.classify.images import Crop

PROGRAM = Program.of("classify/resize.cu", "classify_resize")
MOST_SCALE = 90
"""How many times smaller photographs are made at most: the weights for it fit into the 48 KiB of shared memory that a
launch has on every card."""
_TILE, _WARPS = 32, 8
_WEIGHT_BYTES = 4
_CHOOSES = int(PIL.__version__.partition(".")[0]) >= 13
"""Whether Pillow goes down a photograph first where it loses far more height than width; before it never did. Of 3 x
700 pixels its 12.3 makes bytes that are off by one from those here."""
_PHOTOGRAPH = np.dtype(
    [
        ("address", np.uint64),
        ("size", np.int32, 2),
        ("row", np.int32),
        ("down_first", np.int32),
        ("corner", np.float64, 2),
        ("scale", np.float64, 2),
    ]
)
"""What the kernel is told of a photograph."""


def is_taken(width: int, height: int, crop: Crop) -> bool:
    """Whether a photograph is not larger than there is room for."""
    return min(width, height) <= MOST_SCALE * crop.resize


def resize(
    photographs: Mapping[int, torch.Tensor],
    crop: Crop,
    squares: torch.Tensor,
    options: TwinOptions = TwinOptions(),
) -> None:
    """Writes photographs, dense and [3, height, width] each, to the squares of those numbers, [side, side, 3] each.

    All are uint8 and on one device. On a GPU they are to be kept until its current stream has read them, which nothing
    waits for.
    """
    if not photographs:
        return
    table = _table(photographs, crop)
    told = torch.from_numpy(table.view(np.uint8))
    tensors = {"squares": squares}
    if squares.is_cuda:
        # From pinned memory, which PyTorch keeps until it has been copied: nobody waits for that.
        told = told.pin_memory().to(squares.device, non_blocking=True)
    else:  # the twin is held to what it is given, of which the kernel finds most by addresses in the table
        tensors |= {f"photograph {number}": photograph for number, photograph in photographs.items()}
    taps = _taps(float(table["scale"].max()))
    bind(recipe(len(photographs), crop.side, taps), tensors | {"photographs": told}, options=options)()


def recipe(count: int, side: int, taps: int) -> Recipe:
    """The launch for so many photographs, each pixel of a square made of at most `taps` of theirs along one side."""
    tiles = math.ceil(side / _TILE)
    call = KernelCall(
        PROGRAM,
        (tiles, tiles, count),
        (_TILE, _WARPS, 1),
        (Buffer("photographs"), Buffer("squares"), side, taps),
        shared_bytes=2 * taps * _TILE * _WEIGHT_BYTES,
    )
    return Recipe((call,))


def _taps(scale: float) -> int:
    """The most pixels that one is made of where they become fewer by that factor."""
    return 2 * math.ceil(max(scale, 1.0)) + 1


def _table(photographs: Mapping[int, torch.Tensor], crop: Crop) -> np.ndarray:
    """What the kernel is told; all photographs at a time, since this is done with the interpreter's lock."""
    images = list(photographs.values())
    table = np.empty(len(images), _PHOTOGRAPH)
    table["address"] = [image.data_ptr() for image in images]
    shapes = np.array([size for image in images for size in image.shape], np.int32)
    sizes = table["size"] = shapes.reshape(-1, 3)[:, :0:-1]
    table["row"] = list(photographs)
    # In single precision, subtraction too, as Pillow has a box.
    corner, end = (edge.astype(np.float32) for edge in crop.boxes(sizes))
    table["corner"] = corner
    table["scale"] = (end - corner).astype(np.float64) / crop.side
    lost = sizes - crop.side
    table["down_first"] = _CHOOSES & (lost[:, 1] > 0) & (lost[:, 1] > 2 * lost[:, 0])
    return table
