"""Plans as an engine caches them: ready to be called, with what they were made for, and checks of `out`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import torch

from escalade.device.strides import has_overlap, overlap
from escalade.engine.calls import Calls
from escalade.engine.graph.forms import InputFormat, require_dense
from escalade.engine.graph.graph import Graph, fixed_shape
from escalade.engine.graph.trees import flatten
from escalade.engine.networks import Network
from escalade.errors import UnsupportedError
from escalade.ops.base.card import DeviceOrCard
from escalade.terminal_text import counted


@dataclass(frozen=True)
class SpecializedGraph:
    """An optimized graph for one batch size, as it is planned, and what it was specialized for."""

    graph: Graph
    formats: Mapping[str, InputFormat]
    images: str
    place: DeviceOrCard
    avoid: frozenset[str]


class CachedPlan:
    """A plan ready to be called, with its network, batch size and last use."""

    def __init__(
        self, calls: Calls, network: Network, batch: int, specialized: SpecializedGraph | None = None
    ) -> None:
        self.calls = calls
        self.network = network
        self.batch = batch
        self.specialized = specialized
        """The graph that was planned; None if the calls are those of another plan."""
        self.returns_one_tensor = calls.plan.graph.structure.is_leaf()
        self.last_use = 0

    def check_out(self, out: Any, device: torch.device) -> list[torch.Tensor]:
        """Return the tensors of `out`, one per result of the plan; raises UnsupportedError if they do not fit."""
        plan, captured = self.calls.plan, self.network.captured
        tensors, structure = flatten(out)
        as_sequence = isinstance(out, tuple | list) and len(out) == len(tensors)
        if len(tensors) != len(plan.graph.outputs) or not (structure == plan.graph.structure or as_sequence):
            raise UnsupportedError(
                f"out has {counted(len(tensors), 'tensor')}; pass the structure that the engine returns, or a tuple "
                "or list of "
                f"{counted(len(plan.graph.outputs), 'tensor')}"
            )
        for tensor, name, dtype in zip(tensors, captured.outputs, plan.output_dtypes, strict=True):
            wanted = (fixed_shape(captured.shape_of(name), self.batch), dtype, device)
            if (tuple(tensor.shape), tensor.dtype, tensor.device) != wanted:
                raise UnsupportedError(
                    f"out has a {tensor.dtype} of {tuple(tensor.shape)} on {tensor.device}; this result needs a "
                    f"{dtype} of {wanted[0]} on {device}"
                )
            if tensor.requires_grad:
                raise UnsupportedError(
                    "out requires gradients, but an engine's results have none; pass a tensor that does not require "
                    "them"
                )
            require_dense([tensor], "out has", "results are written to dense tensors")
        _require_no_overlap(tensors)
        return tensors


class GuardedPlan(NamedTuple):
    """A plan, and a guard that is true for tensors like the one it was last called with."""

    cached: CachedPlan
    matches: Callable[..., bool]


def _require_no_overlap(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse tensors in which elements share memory: kernels write elements in no particular order."""
    for tensor in tensors:
        if has_overlap(tensor):
            raise UnsupportedError(
                f"out has a tensor of strides {tensor.stride()}, whose elements overlap; pass one from torch.empty"
            )
    if any(overlap(one, other) for one, other in combinations(tensors, 2)):
        raise UnsupportedError("two tensors in out share memory; pass separate tensors for each result")
