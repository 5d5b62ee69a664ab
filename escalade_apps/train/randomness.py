"""Random generators that depend only on a seed and a purpose, so that a resumed run draws the same numbers."""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """Return an independent CPU generator for each seed and purpose."""
    digest = hashlib.blake2b(repr((seed, *purpose)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
