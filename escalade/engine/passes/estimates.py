"""What steps would take, for passes that have to know whether they pay."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from escalade.engine.graph.graph import Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card
from escalade.ops.base.problem import traffic
from escalade.ops.choose.choice import Choice, estimated


@dataclass(frozen=True)
class Estimates:
    """Choices and times on a card, without the rungs that `avoid` names."""

    card: Card
    avoid: frozenset[str] = frozenset()

    def chosen(self, lowered: Lowered) -> Choice:
        """The rung for a step, by the estimates alone."""
        return estimated(lowered.operation, lowered.problem, self.card, self.avoid)

    def us(self, choice: Choice) -> float:
        """Microseconds of a step; of its bytes alone where nobody has a model of it."""
        return self.card.microseconds(0, traffic(choice.problem)) if choice.us is None else choice.us

    def of_nodes(self, nodes: Iterable[Node], forms: Forms) -> float | None:
        """Microseconds of nodes one after the other; None if one of them is not Escalade's."""
        try:
            steps = [operator_of(node).lower(node, forms) for node in nodes]
            return None if None in steps else sum(self.us(self.chosen(step)) for step in steps if step)
        except UnsupportedError:
            return None
