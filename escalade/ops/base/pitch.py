"""Pixel pitch: NHWC images that are a slice of the channels of a larger buffer, such as part of a concatenation.

A problem has a field `x_pitch`, `y_pitch`, … for every buffer that may be such a slice: the elements from one pixel to
the next, 0 if dense. The kernel's pointer includes the slice's offset; pointer and pitch are multiples of 16 bytes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from functools import cache
from typing import Any

import torch

from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import STORAGE, VECTOR_BYTES

_FIELD = "_pitch"
_NAN = 0xFF  # repeated, this byte is a NaN in every floating type


@cache
def pitched_roles(kind: Any) -> tuple[str, ...]:
    """Names of the buffers of a problem class that may have a pitch."""
    return tuple(field.name.removesuffix(_FIELD) for field in fields(kind) if field.name.endswith(_FIELD))


def pitch_of(problem: Any, role: str) -> int:
    """Return the elements from pixel to pixel of a buffer; 0 if dense."""
    return int(getattr(problem, role + _FIELD, 0))


def pitches(problem: Any) -> dict[str, int]:
    """Return the pitch of every buffer that is not dense."""
    kind: Any = type(problem)
    found = {role: pitch_of(problem, role) for role in pitched_roles(kind)}
    return {role: pitch for role, pitch in found.items() if pitch}


def pitch_fields(found: dict[str, int]) -> dict[str, int]:
    """Return the problem fields that hold these pitches."""
    return {role + _FIELD: pitch for role, pitch in found.items()}


def check_pitches(problem: Any, **channels: int) -> None:
    """Raise unless pixels of `channels[role]` elements do not overlap and are aligned for 16-byte accesses."""
    for role, pitch in pitches(problem).items():
        least, bytes = channels[role], pitch * STORAGE[problem.dtype].itemsize
        if pitch < least or bytes % VECTOR_BYTES:
            raise UnsupportedError(
                f"{role}_pitch is {pitch}: use 0 (dense), or at least the {least} channels of a pixel and a multiple "
                f"of {VECTOR_BYTES} bytes"
            )


def unsupported_pitch(rung: str, problem: Any, supported: Collection[str] = ()) -> str | None:
    """Return why a rung cannot run: a pitch on a buffer not in `supported`, or outside NHWC."""
    for role, pitch in pitches(problem).items():
        if problem.layout != "nhwc" or role not in supported:
            return f"{rung} needs a dense {role} in {problem.layout}, not a pitch of {pitch} elements"
    return None


def with_pitch(tensor: torch.Tensor, pitch: int, between: int = _NAN) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy of [N, C, H, W] images in NHWC with that pitch, and the gap bytes, filled with `between`."""
    n, c, h, w = tensor.shape
    size = tensor.element_size()
    memory = torch.full((n * h * w, pitch * size), between, dtype=torch.uint8, device=tensor.device)
    image = memory.view(tensor.dtype).view(n, h, w, pitch)[..., :c].permute(0, 3, 1, 2)
    return image.copy_(tensor), memory[:, c * size :]
