"""Several nodes that only move elements as one; made by the plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from escalade.engine.graph.forms import Form
from escalade.engine.graph.graph import Node
from escalade.engine.nodes.base import Layouts, Operator, Tensors
from escalade.engine.nodes.lowering import Forms, Lowered, Moved
from escalade.engine.nodes.movement import SOURCES, lower_moved


class Move(Operator):
    """The result of `nodes`, each of which reads inputs by their roles and those in front of it by their numbers; x0 as
    it is if there are none. A result that has the bytes of its only input calls that one x."""

    name = "move"
    values = ("x", *SOURCES)

    def __init__(self, operator: Callable[[str], Operator]) -> None:
        """`operator` finds one by its name."""
        self._operator = operator

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        last, given = self._last(node, inputs)
        return given["x0"] if last is None else self._operator(last.op).compute(last, given)

    def _last(self, node: Node, inputs: Tensors) -> tuple[Node | None, Tensors]:
        """The last of the nodes, and what it reads, computed by all in front of it."""
        known = dict(inputs)
        nodes: Sequence[Node] = node.attributes["nodes"]
        for number, one in enumerate(nodes):
            given = {role: known[name] for role, name in one.inputs.items()}
            if number == len(nodes) - 1:
                return one, given
            known[str(number)] = self._operator(one.op).compute(one, given)
        return None, known

    def moved(self, node: Node, inputs: Tensors, result: torch.Tensor) -> Sequence[Moved] | None:
        last, given = self._last(node, inputs)
        if last is None:
            return (Moved(given["x0"], result),)
        return self._operator(last.op).moved(last, given, result)

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        return lower_moved(self, node, forms)

    def may_share(self, node: Node) -> bool:
        return True

    def is_alias(self, node: Node, forms: Forms) -> bool:
        return "x" in node.inputs

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts(None, node.attributes["layout"])

    def title(self, node: Node) -> str:
        """What the last of the nodes is called, which stands in the model."""
        nodes: Sequence[Node] = node.attributes["nodes"]
        return self._operator(nodes[-1].op).title(nodes[-1]) if nodes else self.name

    @classmethod
    def of(cls, nodes: Sequence[Node], roots: Mapping[str, str], form: Form) -> Node:
        """A node in the place of the last of these, with the values that they read from others by role."""
        known = {name: role for role, name in roots.items()}
        inside = []
        for number, one in enumerate(nodes):
            inputs = {role: known[name] for role, name in one.inputs.items()}
            inside.append(replace(one, name=str(number), inputs=inputs))
            known[one.name] = str(number)
        given: dict[str, str | None] = dict(roots)
        return cls.instead_of(nodes[-1], given, nodes=tuple(inside), layout=form.layout)

    @classmethod
    def copied(cls, name: str, value: str, form: Form) -> Node:
        """A node that copies a value as it is."""
        attributes = {"layout": form.layout, "nodes": (), "copy": True}
        return cls.node(name, {"x0": value}, attributes, form.shape, str(form.dtype).removeprefix("torch."))
