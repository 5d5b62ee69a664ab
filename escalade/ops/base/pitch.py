"""Images whose pixels lie apart: in NHWC, some of the channels of a larger buffer, as a part of a concatenation is.

A problem has a field `x_pitch`, `y_pitch`, … for every buffer that may be such a part: the elements from one pixel to
the next, 0 where the buffer is dense. Where the part begins is in the address that a kernel is given, a multiple of
16 bytes, as the pitch is.
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
_NAN = 0xFF
"""A byte of which every floating type has a NaN."""


@cache
def pitched_roles(kind: Any) -> tuple[str, ...]:
    """The buffers of a kind of problem that may lie apart."""
    return tuple(field.name.removesuffix(_FIELD) for field in fields(kind) if field.name.endswith(_FIELD))


def pitch_of(problem: Any, role: str) -> int:
    """Elements from pixel to pixel of the buffer of that name; 0: it is dense."""
    return int(getattr(problem, role + _FIELD, 0))


def pitches(problem: Any) -> dict[str, int]:
    """Elements from pixel to pixel of every buffer that is not dense, by its name."""
    kind: Any = type(problem)
    found = {role: pitch_of(problem, role) for role in pitched_roles(kind)}
    return {role: pitch for role, pitch in found.items() if pitch}


def pitch_fields(found: dict[str, int]) -> dict[str, int]:
    """The fields of a problem that hold these."""
    return {role + _FIELD: pitch for role, pitch in found.items()}


def check_pitches(problem: Any, **channels: int) -> None:
    """Pixels of so many channels do not overlap, and begin where wide accesses may."""
    for role, pitch in pitches(problem).items():
        least, bytes = channels[role], pitch * STORAGE[problem.dtype].itemsize
        if pitch < least or bytes % VECTOR_BYTES:
            raise UnsupportedError(
                f"{role}_pitch of {pitch}: it is 0 or at least the {least} channels of a pixel, and a multiple of "
                f"{VECTOR_BYTES} bytes"
            )


def unsupported_pitch(rung: str, problem: Any, takes: Collection[str] = ()) -> str | None:
    """What a rung says whose kernels take no buffers apart but these, and none but in NHWC."""
    for role, pitch in pitches(problem).items():
        if problem.layout != "nhwc" or role not in takes:
            return f"{rung} takes {role} dense in {problem.layout}, not its pixels {pitch} elements apart"
    return None


def apart(tensor: torch.Tensor, pitch: int, between: int = _NAN) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [N, C, H, W] in NHWC with so many elements from pixel to pixel, and the bytes that lie between."""
    n, c, h, w = tensor.shape
    size = tensor.element_size()
    memory = torch.full((n * h * w, pitch * size), between, dtype=torch.uint8, device=tensor.device)
    image = memory.view(tensor.dtype).view(n, h, w, pitch)[..., :c].permute(0, 3, 1, 2)
    return image.copy_(tensor), memory[:, c * size :]
