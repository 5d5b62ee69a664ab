"""Check the tensors that a caller passes as `out`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch

from escalade.device.strides import has_overlap, overlap
from escalade.engine.cached_plan import CachedPlan
from escalade.engine.graph.forms import require_dense
from escalade.engine.graph.graph import fixed_shape
from escalade.engine.graph.trees import flatten
from escalade.errors import UnsupportedError
from escalade.terminal_text import counted


def check_out(out: Any, cached: CachedPlan, device: torch.device) -> list[torch.Tensor]:
    """Return the tensors of `out`, one per result of the plan; raises UnsupportedError if they do not fit."""
    plan, captured = cached.calls.plan, cached.network.captured
    tensors, structure = flatten(out)
    as_sequence = isinstance(out, tuple | list) and len(out) == len(tensors)
    if len(tensors) != len(plan.graph.outputs) or not (structure == plan.graph.structure or as_sequence):
        raise UnsupportedError(
            f"out has {counted(len(tensors), 'tensor')}; pass the structure that the engine returns, or a tuple "
            "or list of "
            f"{counted(len(plan.graph.outputs), 'tensor')}"
        )
    types = (getattr(torch, name) for name in plan.graph.output_types)
    for tensor, name, dtype in zip(tensors, captured.outputs, types, strict=True):
        wanted = (fixed_shape(captured.shape_of(name), cached.batch), dtype, device)
        if (tuple(tensor.shape), tensor.dtype, tensor.device) != wanted:
            raise UnsupportedError(
                f"out has a {tensor.dtype} of {tuple(tensor.shape)} on {tensor.device}; this result needs a {dtype} of "
                f"{wanted[0]} on {device}"
            )
        if tensor.requires_grad:
            raise UnsupportedError(
                "out requires gradients, but an engine's results have none; pass a tensor that does not require them"
            )
        require_dense([tensor], "out has", "results are written to dense tensors")
    _require_no_overlap(tensors)
    return tensors


def _require_no_overlap(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors in which elements share memory: kernels write elements in no particular order."""
    for tensor in tensors:
        if has_overlap(tensor):
            raise UnsupportedError(
                f"out has a tensor of strides {tensor.stride()}, whose elements overlap; pass one from torch.empty"
            )
    if any(overlap(one, other) for one, other in combinations(tensors, 2)):
        raise UnsupportedError("two tensors in out share memory; pass separate tensors for each result")
