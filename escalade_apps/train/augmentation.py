"""Images turned about and shifted while they are trained on, where they lie: on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from escalade_apps.train.randomness import generator


@dataclass(frozen=True)
class Moves:
    """What is done to each image of some."""

    flips: torch.Tensor
    """int64, [images]: 1 where left and right change places."""
    shifts: torch.Tensor
    """int64, [images, 2]: by how many rows and columns."""

    def some(self, indices: torch.Tensor) -> Moves:
        return Moves(self.flips[indices], self.shifts[indices])

    def to(self, device: torch.device) -> Moves:
        return Moves(self.flips.to(device, non_blocking=True), self.shifts.to(device, non_blocking=True))


@dataclass(frozen=True)
class Augmentation:
    """What may be done to an image."""

    flip: bool = False
    shift: int = 0
    """The most rows and columns."""

    def __bool__(self) -> bool:
        return self.flip or self.shift > 0

    def moves(self, seed: int, epoch: int, images: int) -> Moves:
        """Drawn for every image of a dataset, whatever batch and process it will be in."""
        random = generator(seed, "moves", epoch)
        flips = torch.randint(2 if self.flip else 1, (images,), generator=random)
        return Moves(flips, torch.randint(-self.shift, self.shift + 1, (images, 2), generator=random))


def moved(pixels: torch.Tensor, moves: Moves) -> torch.Tensor:
    """Images [images, rows, columns, channels], each moved its own way; what comes in at an edge is mirrored."""
    images, rows, columns, _ = pixels.shape
    across = torch.arange(columns, device=pixels.device)
    across = torch.where(moves.flips[:, None] == 1, columns - 1 - across, across)
    down = torch.arange(rows, device=pixels.device)
    from_rows = _mirrored(down + moves.shifts[:, :1], rows)
    from_columns = _mirrored(across + moves.shifts[:, 1:], columns)
    which = torch.arange(images, device=pixels.device)[:, None, None]
    return pixels[which, from_rows[:, :, None], from_columns[:, None, :]]


def _mirrored(positions: torch.Tensor, size: int) -> torch.Tensor:
    """Positions up to a size beyond either end, as a mirror there shows them: -1 is 1, size is size - 2."""
    if size == 1:
        return torch.zeros_like(positions)
    return size - 1 - (size - 1 - positions.abs()).abs()
