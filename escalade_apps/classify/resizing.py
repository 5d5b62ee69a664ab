"""Resize and crop decoded images of any sizes with one kernel launch, bit-exact with Pillow."""

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
MAX_SCALE = 90
"""Largest downscaling factor: its weights fit in the 48 KiB of shared memory that every launch may use."""
_TILE, _WARPS = 32, 8
_WEIGHT_BYTES = 4
_MAY_RESIZE_ROWS_FIRST = int(PIL.__version__.partition(".")[0]) >= 13
"""Since version 13 Pillow resizes vertically first where the image loses far more height than width. The order affects
rounding: for an image of 3 x 700 pixels, Pillow 12.3 differs from 13 by one in some bytes."""
_IMAGE = np.dtype(
    [
        ("address", np.uint64),
        ("size", np.int32, 2),
        ("row", np.int32),
        ("down_first", np.int32),
        ("corner", np.float64, 2),
        ("scale", np.float64, 2),
    ]
)
"""Kernel argument for one image; the layout matches the struct in classify/resize.cu."""


def is_supported(width: int, height: int, crop: Crop) -> bool:
    """Return True if the downscaling factor is at most `MAX_SCALE`."""
    return min(width, height) <= MAX_SCALE * crop.resize


def resize(
    images: Mapping[int, torch.Tensor],
    crop: Crop,
    squares: torch.Tensor,
    options: TwinOptions = TwinOptions(),
) -> None:
    """Write `images[i]`, a contiguous [3, height, width], to `squares[i]`, which is [side, side, 3].

    All are uint8 on one device. On a GPU this is asynchronous: keep `images` alive until the current stream is done.
    """
    if not images:
        return
    table = _table(images, crop)
    arguments = torch.from_numpy(table.view(np.uint8))
    tensors = {"squares": squares}
    if squares.is_cuda:
        # PyTorch keeps pinned memory alive until its asynchronous copy is done.
        arguments = arguments.pin_memory().to(squares.device, non_blocking=True)
    else:  # the twin only allows access to tensors it knows, and the kernel finds these through addresses
        tensors |= {f"photograph {number}": image for number, image in images.items()}
    taps = _taps(float(table["scale"].max()))
    bind(recipe(len(images), crop.side, taps), tensors | {"photographs": arguments}, options=options)()


def recipe(count: int, side: int, taps: int) -> Recipe:
    """Return the launch for `count` images whose output pixels read at most `taps` input pixels per dimension."""
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
    """Return the support of the triangle filter at a downscaling factor, in input pixels."""
    return 2 * math.ceil(max(scale, 1.0)) + 1


def _table(images: Mapping[int, torch.Tensor], crop: Crop) -> np.ndarray:
    """Return the kernel arguments. Vectorized over the images, because this runs under the GIL."""
    table = np.empty(len(images), _IMAGE)
    table["address"] = [image.data_ptr() for image in images.values()]
    shapes = np.array([size for image in images.values() for size in image.shape], np.int32)
    sizes = table["size"] = shapes.reshape(-1, 3)[:, :0:-1]
    table["row"] = list(images)
    # In single precision, including the subtraction, because Pillow stores boxes as floats.
    corner, end = (edge.astype(np.float32) for edge in crop.boxes(sizes))
    table["corner"] = corner
    table["scale"] = (end - corner).astype(np.float64) / crop.side
    lost = sizes - crop.side
    table["down_first"] = _MAY_RESIZE_ROWS_FIRST & (lost[:, 1] > 0) & (lost[:, 1] > 2 * lost[:, 0])
    return table
