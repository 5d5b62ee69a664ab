"""Plans as an engine caches them: ready to be called, with what they were made for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from escalade.engine.calls import Calls
from escalade.engine.graph.graph import Graph
from escalade.engine.network import Network
from escalade.ops.base.card import DeviceOrCard


@dataclass(frozen=True)
class SpecializedGraph:
    """An optimized graph for one batch size, as it is planned, and what it was specialized for."""

    graph: Graph
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


class GuardedPlan(NamedTuple):
    """A plan, and a guard that is true for tensors like the one it was last called with."""

    cached: CachedPlan
    matches: Callable[..., bool]
