"""Tiles of pixels with 16 bytes of channels per thread, for gradients of NHWC pooling."""

from __future__ import annotations

from dataclasses import dataclass

from escalade.ops.base.card import Card
from escalade.ops.base.dtypes import widest_vector
from escalade.ops.base.grid import blocks
from escalade.ops.base.rung import Config
from escalade.ops.shared.images import ImageProblem

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


def refusal(rung: str, images: ImageProblem) -> str | None:
    """Return why such a rung does not support these images."""
    if images.layout != "nhwc":
        return f"{rung} supports layout nhwc, not {images.layout}"
    if ONE_PIXEL.threads_for(images) >= 2**31:
        return f"{rung} counts threads in 32 bits; {images.name} needs more"
    return None


def configs(images: ImageProblem, card: Card) -> tuple[PixelTile, ...]:
    """Return all tiles; the default is 2x2 pixels if that keeps the card busy, else one."""
    busy = TILES[0].threads_for(images) >= BUSY_THREADS * card.multiprocessors
    default = TILES[0] if busy else ONE_PIXEL
    return tuple(sorted(TILES, key=lambda tile: tile != default))
