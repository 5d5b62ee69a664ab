"""Tiles of pixels with 16 bytes of channels a thread: how the gradients of poolings in NHWC lie over threads."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.device.program import Constant
from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Config
from escalade.ops.shared.images import ImageProblem

BUSY_THREADS = 4 * 2048
"""Threads a multiprocessor that fill it four times."""


@dataclass(frozen=True)
class PixelTile(Config):
    rows: int
    columns: int
    """Pixels that a thread takes."""
    threads: int = 128

    def threads_for(self, images: ImageProblem) -> int:
        p = images
        vectors = p.channels // widest_vector(p.dtype, p.channels)
        return p.batch * blocks(p.height, self.rows) * blocks(p.width, self.columns) * vectors

    def constants(self, images: ImageProblem) -> dict[str, Constant]:
        return {
            "VECTOR": widest_vector(images.dtype, images.channels),
            "TILE_ROWS": self.rows,
            "TILE_COLUMNS": self.columns,
        }


ONE_PIXEL = PixelTile(1, 1)
TILES = (PixelTile(2, 2), ONE_PIXEL, PixelTile(1, 2), PixelTile(1, 4))


def refusal(rung: str, images: ImageProblem) -> str | None:
    """What such a rung says of images that it does not take."""
    if images.layout != "nhwc":
        return f"{rung} takes layout nhwc, not {images.layout}"
    if ONE_PIXEL.threads_for(images) >= 2**31:
        return f"{rung} counts threads in 32 bits; there are too many for {images.name}"
    return None


def configs(images: ImageProblem, card: Card) -> tuple[PixelTile, ...]:
    """A square of pixels where that leaves the card busy, else one."""
    busy = TILES[0].threads_for(images) >= BUSY_THREADS * card.multiprocessors
    default = TILES[0] if busy else ONE_PIXEL
    return tuple(sorted(TILES, key=lambda tile: tile != default))
