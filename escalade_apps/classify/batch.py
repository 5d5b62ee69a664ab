"""What decoders make for engines."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from escalade_apps.classify.images import Source, Unreadable


@dataclass(frozen=True)
class Batch:
    """Images for an engine, uint8, those of `files` first, and what was passed over on the way to them."""

    files: list[Source]
    images: torch.Tensor
    refused: list[Unreadable]
