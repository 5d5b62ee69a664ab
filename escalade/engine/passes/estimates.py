"""Time estimates, for passes that have to weigh one graph against another."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from escalade.engine.graph.forms import STORAGE, Form
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of, stored_forms
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card
from escalade.ops.base.problem import Problem, traffic
from escalade.ops.choose.choice import Choice, estimated

BANDWIDTH_REACHED = 0.7
"""Share of the memory bandwidth that kernels without a cost model reach: 0.53 to 0.93 on an H200."""


def nhwc_forms(graph: Graph, dtype: str) -> Forms:
    """Return the forms of all values; inputs are assumed to be NHWC."""
    inputs = {
        entry.name: Form(entry.shape, graph.dtype_of(entry.name) if graph.typed else STORAGE[dtype], "nhwc")  # type: ignore[arg-type]
        for entry in graph.inputs
    }
    return Forms(dtype, inputs | stored_forms(graph, dtype), graph.constants, graph.typed)


@dataclass(frozen=True)
class Estimates:
    """Rungs and times on a card, excluding the rungs in `avoid`."""

    card: Card
    avoid: frozenset[str] = frozenset()
    _chosen: dict[tuple[str, Problem], Choice] = field(default_factory=dict, compare=False, repr=False)

    def choose(self, lowered: Lowered) -> Choice:
        """Return the rung with the least estimate."""
        key = lowered.operation.name, lowered.problem
        if key not in self._chosen:  # networks repeat their layers
            self._chosen[key] = estimated(lowered.operation, lowered.problem, self.card, self.avoid)
        return self._chosen[key]

    def us(self, choice: Choice) -> float:
        """Return the time of a step; for a rung without a cost model, by its memory traffic."""
        if choice.us is not None:
            return choice.us
        return self.card.microseconds(0, traffic(choice.problem)) / BANDWIDTH_REACHED

    def total_us(self, nodes: Iterable[Node], forms: Forms) -> float | None:
        """Return the total time of nodes; None if one of them has no kernel of ours."""
        try:
            steps = [operator_of(node).lower(node, forms) for node in nodes]
            return None if None in steps else sum(self.us(self.choose(step)) for step in steps if step)
        except UnsupportedError:
            return None
