"""Time estimates, for passes that have to weigh one graph against another."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from escalade.engine.graph.forms import STORAGE, Form
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of, stored_forms
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card
from escalade.ops.base.problem import traffic
from escalade.ops.choose.choice import Choice, estimated

BANDWIDTH_REACHED = 0.7
"""Share of the memory bandwidth that kernels without a cost model reach: 0.53 to 0.93 on an H200."""


def assumed_forms(graph: Graph, dtype: str, images: str = "nhwc") -> Forms:
    """Return the forms of all values; inputs are assumed to have the plan's dtype and this layout of images."""
    inputs = {
        entry.name: Form(
            entry.shape,  # type: ignore[arg-type]
            graph.dtype_of(entry.name) if graph.typed else STORAGE[dtype],
            images if len(entry.shape) == 4 else "flat",
        )
        for entry in graph.inputs
    }
    return Forms(dtype, inputs | stored_forms(graph, dtype), graph.constants, graph.typed)


@dataclass(frozen=True)
class Estimates:
    """Rungs and times on a card, excluding the rungs in `avoid`."""

    card: Card
    avoid: frozenset[str] = frozenset()

    def choose(self, lowered: Lowered) -> Choice:
        """Return the rung with the least estimate."""
        return estimated(lowered.operation, lowered.problem, self.card, self.avoid)

    def us(self, choice: Choice) -> float:
        """Return the time of a step; for a rung without a cost model, by its memory traffic."""
        if choice.us is not None:
            return choice.us
        return self.card.microseconds(0, traffic(choice.problem)) / BANDWIDTH_REACHED

    def choice(
        self,
        node: Node,
        forms: Forms,
        pitches: Mapping[str, int] = MappingProxyType({}),
        *,
        exact: bool = False,
    ) -> Choice | None:
        """Return the rung for a node whose inputs have these pixel pitches by role; None if no rung supports it.

        With `exact`, also None if the rung would need a conversion.
        """
        try:
            lowered = operator_of(node).lower(node, forms)
            if lowered is None:
                return None
            problem = lowered.with_pitches(pitches) if pitches else lowered.problem
            if problem is None:
                return None
            choice = self.choose(replace(lowered, problem=problem))
        except UnsupportedError:
            return None
        return choice if choice.problem == problem or not exact else None

    def favor(
        self, new: Iterable[Node], old: Iterable[Node], forms: Forms | None, share: float = 1.0
    ) -> bool:
        """Return True if kernels compute `new`, in less than this share of the time that `old` takes.

        Without `forms` there are no kernels.
        """
        if forms is None:
            return False
        before, after = self.total_us(old, forms), self.total_us(new, forms)
        return before is not None and after is not None and after < share * before

    def total_us(self, nodes: Iterable[Node], forms: Forms) -> float | None:
        """Return the total time of nodes; None if one of them has no kernel of ours."""
        try:
            steps = [operator_of(node).lower(node, forms) for node in nodes]
            return None if None in steps else sum(self.us(self.choose(step)) for step in steps if step)
        except UnsupportedError:
            return None
