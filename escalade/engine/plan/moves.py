"""Movements of elements that PyTorch would do, put together and given to a kernel.

A permutation, a range with a step or a repetition is a view for PyTorch, which costs nothing until a kernel wants the
elements one behind the other: then it is a copy. One kernel does all that lies between a value in the plan's memory and
such a copy, with the strides that PyTorch's own views have; where the bytes are the same after all, nothing is done.
What only PyTorch reads stays a view, and so does whatever PyTorch has made: it lies where PyTorch puts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from escalade.engine.graph.forms import Form
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.base import is_view_of
from escalade.engine.nodes.lowering import Moved
from escalade.engine.nodes.move import Move
from escalade.engine.nodes.movement import problem_of
from escalade.engine.plan.choices import Choices
from escalade.engine.plan.subbuffers import is_taken_in_place
from escalade.errors import UnsupportedError


class _Seen(NamedTuple):
    """A value as a view of another."""

    nodes: tuple[Node, ...]
    root: str
    tensor: torch.Tensor
    """The view, in memory without contents that lies as the root's."""


def gather_moves(graph: Graph, forms: Mapping[str, Form], choices: Choices) -> Graph:
    """The graph with kernels for what only moves, where PyTorch would copy it; itself if there is nothing like that."""
    work = _Moving(graph, forms, choices)
    for node in reversed(tuple(graph)):  # whoever reads a value has said so before it is asked for
        if work.is_left_to_pytorch(node) and work.is_wanted(node):
            found = work.move(node)
            if found is not None:
                work.made[node.name] = found
    if not work.made:
        return graph
    changed = graph.copy()
    changed.nodes = {node.name: work.made.get(node.name, node) for node in graph}
    changed.remove_dead_code()
    choices.rewritten(changed.nodes)
    return changed


@dataclass
class _Moving:
    graph: Graph
    forms: Mapping[str, Form]
    choices: Choices

    def __post_init__(self) -> None:
        self.made: dict[str, Node] = {}
        """The nodes that kernels do after all, by name."""
        self._seen: dict[str, _Seen] = {}

    def is_left_to_pytorch(self, node: Node) -> bool:
        """Whether PyTorch does a node that may only move elements, or has made a view of what that moves."""
        operator = operator_of(node)
        if not node.is_floating or node.name in self.choices.forced:
            return False
        if operator.concatenated(node) is not None:  # kernels write the others where they belong
            return all(self._is_pytorchs_view(name) for name in node.inputs.values())
        step = self.choices.of(node)
        if not step.in_pytorch:
            return step.runs and self._is_pytorchs_view(node.name)
        return operator.taken(node) is None or not is_taken_in_place(node, self.forms)

    def _is_pytorchs_view(self, name: str) -> bool:
        if name in self.graph.constants:  # which have no form: each reader has its own
            return False
        return any(self.choices.of(node).in_pytorch for node in self.seen(name).nodes)

    def is_wanted(self, node: Node) -> bool:
        """Whether somebody wants a node's elements one behind the other: a kernel, also through what has the same
        bytes, or the caller."""
        if node.name in self.graph.outputs or any(
            node.name in moved.inputs.values() for moved in self.made.values()
        ):
            return True
        is_range = operator_of(node).taken(node) is not None
        return any(self._wants(reader, is_range) for reader in self.graph.readers(node.name))

    def _wants(self, reader: Node, is_range: bool) -> bool:
        if reader.name in self.made:
            return False  # it reads what this is a view of
        if operator_of(reader).concatenated(reader) is not None:
            return not is_range and not self.is_left_to_pytorch(reader)
        step = self.choices.of(reader)
        return self.is_wanted(reader) if step.is_alias else not step.in_pytorch

    def seen(self, name: str) -> _Seen:
        """A value as a view of one in the plan's memory, through as many nodes as PyTorch has a view of."""
        if name not in self._seen:
            self._seen[name] = self._view(name)
        return self._seen[name]

    def _view(self, name: str) -> _Seen:
        itself = _Seen((), name, self.forms[name].hollow())
        node = self.graph.nodes.get(name)
        if node is None or not self._is_view(node):
            return itself
        (role,) = node.inputs
        before = self.seen(node.inputs[role])
        tensor = operator_of(node).compute(node, {role: before.tensor})
        if tuple(tensor.shape) != node.shape or not is_view_of(tensor, before.tensor):
            return itself
        return _Seen((*before.nodes, node), before.root, tensor)

    def _is_view(self, node: Node) -> bool:
        """Whether a node may be nothing but another view of a value of the same type."""
        names = list(node.inputs.values())
        return (
            node.is_floating
            and len(names) == 1
            and names[0] not in self.graph.constants
            and self.forms[names[0]].dtype == self.forms[node.name].dtype
            and operator_of(node).may_share(node)
        )

    def move(self, node: Node) -> Node | None:
        """The node that has a kernel move what this one does, from values in the plan's memory, if there is one."""
        names = list(dict.fromkeys(node.inputs.values()))
        form = self.forms[node.name]
        if not names or not form.elements or any(name in self.graph.constants for name in names):
            return None
        seen = {name: self.seen(name) for name in names}
        roots = list(dict.fromkeys(view.root for view in seen.values()))
        if any(self.forms[root].dtype != form.dtype or not self._has_memory(root) for root in roots):
            return None
        moved = operator_of(node).moved(
            node, {role: seen[name].tensor for role, name in node.inputs.items()}, form.hollow()
        )
        if moved is None:
            return None
        through = {one.name: one for view in seen.values() for one in view.nodes}
        nodes = (*through.values(), node)
        if len(roots) == 1 and _is_as_it_lies(moved, form, self.forms[roots[0]]):
            return Move.of(nodes, {"x": roots[0]}, form)
        by_role = {f"x{number}": root for number, root in enumerate(roots)}
        memory = {
            role: next(v.tensor for v in seen.values() if v.root == root) for role, root in by_role.items()
        }
        try:
            problem = problem_of(moved, memory, form.elements, form.dtype)
        except UnsupportedError:  # more dimensions or parts than a kernel takes
            return None
        return None if problem is None else Move.of(nodes, by_role, form)

    def _has_memory(self, name: str) -> bool:
        """Whether a value lies in the plan's memory, or will once this is done."""
        if self.choices.has_memory(name):
            return True
        node = self.graph.nodes[name]
        if self.choices.of(node).is_alias:
            return self._has_memory(node.inputs["x"])
        return self.is_left_to_pytorch(node) and self.move(node) is not None


def _is_as_it_lies(moved: Sequence[Moved], form: Form, root: Form) -> bool:
    """Whether a result has all the bytes of a value, each where it is."""
    if len(moved) != 1 or moved[0].reversed or form.bytes != root.bytes:
        return False
    (one,) = moved
    steps = zip(one.source.shape, one.source.stride(), one.target.stride(), strict=True)
    # As many bytes with the same strides begin where the value begins.
    return all(size == 1 or before == after for size, before, after in steps)
