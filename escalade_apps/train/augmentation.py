"""Random flips and shifts, applied on the device, and the generators that all random numbers of a run come from."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """Return an independent CPU generator per seed and purpose: a resumed run draws the same numbers from it."""
    digest = hashlib.blake2b(repr((seed, *purpose)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


@dataclass(frozen=True)
class Moves:
    """Flip and shift per image."""

    flips: torch.Tensor
    """int64, [images]: 1 for a horizontal flip."""
    shifts: torch.Tensor
    """int64, [images, 2]: rows and columns."""

    def select(self, indices: torch.Tensor) -> Moves:
        return Moves(self.flips[indices], self.shifts[indices])

    def to(self, device: torch.device) -> Moves:
        return Moves(self.flips.to(device, non_blocking=True), self.shifts.to(device, non_blocking=True))


@dataclass(frozen=True)
class Augmentation:
    """Augmentation settings."""

    flip: bool = False
    shift: int = 0
    """Most rows and columns to shift by."""

    def __bool__(self) -> bool:
        return self.flip or self.shift > 0

    def moves(self, seed: int, epoch: int, images: int) -> Moves:
        """Draw moves for every image of a dataset, so that they do not depend on batch size or process count."""
        random = generator(seed, "moves", epoch)
        flips = torch.randint(2 if self.flip else 1, (images,), generator=random)
        return Moves(flips, torch.randint(-self.shift, self.shift + 1, (images, 2), generator=random))


def moved(pixels: torch.Tensor, moves: Moves) -> torch.Tensor:
    """Flip and shift images of [images, rows, columns, channels]. Pixels shifted in are mirrored at the edge."""
    images, rows, columns, _ = pixels.shape
    across = torch.arange(columns, device=pixels.device)
    across = torch.where(moves.flips[:, None] == 1, columns - 1 - across, across)
    down = torch.arange(rows, device=pixels.device)
    from_rows = _mirrored(down + moves.shifts[:, :1], rows)
    from_columns = _mirrored(across + moves.shifts[:, 1:], columns)
    image = torch.arange(images, device=pixels.device)[:, None, None]
    return pixels[image, from_rows[:, :, None], from_columns[:, None, :]]


def _mirrored(positions: torch.Tensor, size: int) -> torch.Tensor:
    """Reflect positions that are up to `size` beyond either end: -1 becomes 1, size becomes size - 2."""
    if size == 1:
        return torch.zeros_like(positions)
    return size - 1 - (size - 1 - positions.abs()).abs()
