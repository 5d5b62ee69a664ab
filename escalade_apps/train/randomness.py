"""Random numbers that depend on nothing but a seed and what they are for, so that they can be drawn again."""

from __future__ import annotations

import hashlib

import torch


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A generator on the CPU for one purpose: other seeds and other purposes give other numbers."""
    digest = hashlib.blake2b(repr((seed, *purpose)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))
