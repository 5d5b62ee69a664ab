"""Rungs of the gradients of pooling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from escalade.device.program import Program
from escalade.device.recipe import Argument, Recipe
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import blocks, ceil_div
from escalade.ops.base.launch import launch
from escalade.ops.base.pitch import unsupported_pitch
from escalade.ops.base.rung import Config
from escalade.ops.shared import pooling
from escalade.ops.shared.images import ImageProblem
from escalade.ops.shared.windowed import WindowedImages

# --- tiles of pixels in NHWC, with 16 bytes of channels per thread


BUSY_THREADS = 4 * 2048
"""Threads per SM that fill it four times."""


@dataclass(frozen=True)
class PixelTile(Config):
    rows: int
    columns: int
    """Pixels per thread."""
    threads: int = 128

    def threads_for(self, images: ImageProblem) -> int:
        p = images
        vectors = p.channels // widest_vector(p.dtype, p.channels)
        return p.batch * blocks(p.height, self.rows) * blocks(p.width, self.columns) * vectors


ONE_PIXEL = PixelTile(1, 1)
TILES = (PixelTile(2, 2), ONE_PIXEL, PixelTile(1, 2), PixelTile(1, 4))


def tiles_refusal(rung: str, images: ImageProblem) -> str | None:
    """Return why such a rung does not support these images."""
    if images.layout != "nhwc":
        return f"{rung} supports layout nhwc, not {images.layout}"
    if ONE_PIXEL.threads_for(images) >= 2**31:
        return f"{rung} counts threads in 32 bits; {images.name} needs more"
    return None


def tile_configs(images: ImageProblem, card: Card) -> tuple[PixelTile, ...]:
    """Return all tiles; the default is 2x2 pixels if that keeps the card busy, else one."""
    busy = TILES[0].threads_for(images) >= BUSY_THREADS * card.multiprocessors
    default = TILES[0] if busy else ONE_PIXEL
    return tuple(sorted(TILES, key=lambda tile: tile != default))


# --- non-overlapping windows in NCHW, with up to 16 bytes of a row per thread


MOST_ROWS = 8
"""Most rows per window, since the kernel unrolls them."""


def side_by_side_refusal(rung: str, p: WindowedImages) -> str | None:
    """Return why such a rung does not support a problem; None if it does."""
    vector = widest_vector(p.dtype, p.width)
    if p.layout != "nchw":
        return f"{rung} supports layout nchw, not {p.layout}"
    overlap = any(kernel > stride for kernel, stride in zip(p.kernel, p.stride, strict=True))
    if p.padding != (0, 0) or p.ceil_mode or overlap:
        return f"{rung} needs windows that do not overlap and lie inside the image"
    if p.dilations != (1, 1) or p.stride[0] > MOST_ROWS:
        return f"{rung} needs windows without dilation, and strides of up to {MOST_ROWS} rows"
    if vector % p.stride[1]:
        return f"{rung} reads {vector} columns of a row of {p.width} at once; the stride {p.stride[1]} must divide them"
    if _side_by_side_threads(p) >= 2**31:
        return f"{rung} counts threads in 32 bits; {p.name} needs more"
    return unsupported_pitch(rung, p)


def side_by_side_recipe(
    source: str, p: WindowedImages, buffers: tuple[Argument, ...], threads: int, **scope: Any
) -> Recipe:
    """Launch a source over rows of windows, including the pixel rows below the last window."""
    program = Program.of(source, problem=p, vector=widest_vector(p.dtype, p.width), **scope)
    return launch(program, blocks(_side_by_side_threads(p), threads), threads, *buffers, pooling.shape(p))


def _side_by_side_threads(p: WindowedImages) -> int:
    return (
        p.batch * p.channels * ceil_div(p.height, p.stride[0]) * (p.width // widest_vector(p.dtype, p.width))
    )
