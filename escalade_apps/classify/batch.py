"""Batch type that decoders produce and engines consume."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from escalade_apps.classify.images import Source, Unreadable


@dataclass(frozen=True)
class Batch:
    """One uint8 batch. Row i of `images` is `files[i]`; further rows are padding. `skipped` could not be read."""

    files: list[Source]
    images: torch.Tensor
    skipped: list[Unreadable]
