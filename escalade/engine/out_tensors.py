"""Tensors of the caller's that results are written to."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch

from escalade.device.strides import has_overlap, overlap
from escalade.engine.graph.forms import require_dense
from escalade.engine.graph.graph import fixed_shape
from escalade.engine.graph.trees import flatten
from escalade.engine.plan_cache import Kept
from escalade.errors import UnsupportedError


def rooms_in(out: Any, kept: Kept, device: torch.device) -> list[torch.Tensor]:
    """The tensors of `out`, one for each result of a plan, which is on that device."""
    plan, captured = kept.calls.plan, kept.network.captured
    rooms, structure = flatten(out)
    as_sequence = isinstance(out, tuple | list) and len(out) == len(rooms)
    if len(rooms) != len(plan.graph.outputs) or not (structure == plan.graph.structure or as_sequence):
        raise UnsupportedError(
            f"out has {len(rooms)} tensors; it is what the engine returns, or a tuple or list of its "
            f"{len(plan.graph.outputs)} tensors"
        )
    types = (getattr(torch, name) for name in plan.graph.output_types)
    for room, name, dtype in zip(rooms, captured.outputs, types, strict=True):
        wanted = (fixed_shape(captured.shape_of(name), kept.batch), dtype, device)
        if (tuple(room.shape), room.dtype, room.device) != wanted:
            raise UnsupportedError(
                f"out has a {room.dtype} of {tuple(room.shape)} on {room.device}; this result is a {dtype} of "
                f"{wanted[0]} on {device}"
            )
        if room.requires_grad:
            raise UnsupportedError(
                "out requires gradients, and an engine's results have none; give a tensor that requires none"
            )
        require_dense([room], "out has", "results are written to dense tensors")
    _require_places(rooms)
    return rooms


def _require_places(rooms: Sequence[torch.Tensor]) -> None:
    """Refuse memory that two elements of the results share: kernels write them in no particular order."""
    for room in rooms:
        if has_overlap(room):
            raise UnsupportedError(
                f"out has a tensor of strides {room.stride()}, with several elements in one place; give one that "
                "torch.empty has made"
            )
    if any(overlap(one, other) for one, other in combinations(rooms, 2)):
        raise UnsupportedError("out has the same memory for two results; each needs a tensor of its own")
