"""Replace chains of views that end in a copy by one copy kernel.

For PyTorch a permute, a strided slice or an expand is a view. It is free until a kernel needs contiguous elements; then
PyTorch copies. Here one kernel copies straight from the value in the plan's memory through the strides of PyTorch's own
views; if the bytes come out unchanged, nothing runs. Views that only PyTorch reads stay views, and so do views of
PyTorch's own results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from escalade.engine.graph.forms import Form
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.attention import OPERANDS, Attention, in_place
from escalade.engine.nodes.base import is_view_of
from escalade.engine.nodes.lowering import ElementMove
from escalade.engine.nodes.movement import Move, copy_problem
from escalade.engine.nodes.views import Concatenate, Slice
from escalade.engine.plan.choices import StepChoices
from escalade.engine.plan.subbuffers import can_slice_in_place
from escalade.errors import UnsupportedError


class _ViewChain(NamedTuple):
    """A value as a view of another value, `root`, through `nodes`."""

    nodes: tuple[Node, ...]
    root: str
    tensor: torch.Tensor
    """The view as a meta tensor with the root's memory layout."""


def fuse_moves(graph: Graph, forms: Mapping[str, Form], choices: StepChoices) -> Graph:
    """Return the graph with copy kernels where PyTorch would copy; the same graph if there is nothing to replace."""
    fusion = _MoveFusion(graph, forms, choices)
    for node in reversed(tuple(graph)):  # readers first: they decide whether a value must be dense
        if Attention.matches(node) and (changed := fusion.with_operands_in_place(node)) is not node:
            fusion.replaced[node.name] = changed
        elif fusion.is_pytorch_move(node) and fusion.needs_dense(node):
            kernel = fusion.as_kernel(node)
            if kernel is not None:
                fusion.replaced[node.name] = kernel
    if not fusion.replaced:
        return graph
    fused = graph.copy()
    fused.nodes = {node.name: fusion.replaced.get(node.name, node) for node in graph}
    fused.remove_dead_code()
    choices.set_nodes(fused.nodes)
    return fused


@dataclass
class _MoveFusion:
    graph: Graph
    forms: Mapping[str, Form]
    choices: StepChoices

    def __post_init__(self) -> None:
        self.replaced: dict[str, Node] = {}
        """Nodes that become copy kernels, by name."""
        self._chains: dict[str, _ViewChain] = {}

    def is_pytorch_move(self, node: Node) -> bool:
        """Return True if PyTorch computes a node that may only move elements, or the node reads such a view."""
        if not node.is_floating or node.name in self.choices.pytorch_nodes:
            return False
        if Concatenate.matches(node):  # other inputs are written straight into the result
            return all(self._is_pytorch_view(name) for name in node.inputs.values())
        step = self.choices.of(node)
        if not step.in_pytorch:
            return step.runs and self._is_pytorch_view(node.name)
        return not Slice.matches(node) or not can_slice_in_place(node, self.forms)

    def _is_pytorch_view(self, name: str) -> bool:
        if name in self.graph.constants:  # constants have no form of their own: each reader converts its copy
            return False
        return any(self.choices.of(node).in_pytorch for node in self.chains(name).nodes)

    def needs_dense(self, node: Node) -> bool:
        """Return True if a kernel (directly or through an alias) or the caller needs a node's elements contiguous."""
        if node.name in self.graph.outputs or any(
            node.name in moved.inputs.values() for moved in self.replaced.values()
        ):
            return True
        is_range = Slice.matches(node)
        return any(self._reader_needs_dense(reader, is_range) for reader in self.graph.readers(node.name))

    def _reader_needs_dense(self, reader: Node, is_range: bool) -> bool:
        if reader.name in self.replaced:
            return False  # it reads the root of this view
        if Concatenate.matches(reader):
            return not is_range and not self.is_pytorch_move(reader)
        step = self.choices.of(reader)
        if step.is_alias or can_slice_in_place(reader, self.forms):
            return self.needs_dense(reader)
        return not step.in_pytorch

    def chains(self, name: str) -> _ViewChain:
        """Return a value as a view of the farthest value that PyTorch can view it from."""
        if name not in self._chains:
            self._chains[name] = self._trace_view(name)
        return self._chains[name]

    def _trace_view(self, name: str) -> _ViewChain:
        itself = _ViewChain((), name, self.forms[name].meta_tensor())
        node = self.graph.nodes.get(name)
        if node is None or not self._may_be_view(node):
            return itself
        (role,) = node.inputs
        before = self.chains(node.inputs[role])
        tensor = operator_of(node).compute(node, {role: before.tensor})
        if tuple(tensor.shape) != node.shape or not is_view_of(tensor, before.tensor):
            return itself
        return _ViewChain((*before.nodes, node), before.root, tensor)

    def _may_be_view(self, node: Node) -> bool:
        """Return True if a node may be only a view of its one input, without a change of dtype."""
        names = list(node.inputs.values())
        return (
            node.is_floating
            and len(names) == 1
            and names[0] not in self.graph.constants
            and self.forms[names[0]].dtype == self.forms[node.name].dtype
            and operator_of(node).may_alias(node)
        )

    def with_operands_in_place(self, node: Node) -> Node:
        """Return attention that reads its operands through views of other values, such as one packed projection."""
        step = self.choices.of(node)
        if step.choice is None:
            return node
        for role in OPERANDS:
            name = node.inputs[role]
            chain = None if name in self.graph.constants else self.chains(name)
            if chain is None or chain.root == name or not self._has_memory(chain.root):
                continue
            if self.forms[chain.root].dtype != self.forms[name].dtype:
                continue
            changed = in_place(
                node, role, chain.tensor, self.forms[chain.root].layout, step.choice.problem.dtype
            )
            node = node if changed is None else changed.with_inputs(**{role: chain.root})
        return node

    def as_kernel(self, node: Node) -> Node | None:
        """Return a copy node that computes this node from values in the plan's memory, or None."""
        names = list(dict.fromkeys(node.inputs.values()))
        form = self.forms[node.name]
        if not names or not form.elements or any(name in self.graph.constants for name in names):
            return None
        chains = {name: self.chains(name) for name in names}
        roots = list(dict.fromkeys(view.root for view in chains.values()))
        if any(self.forms[root].dtype != form.dtype or not self._has_memory(root) for root in roots):
            return None
        moves = operator_of(node).element_moves(
            node, {role: chains[name].tensor for role, name in node.inputs.items()}, form.meta_tensor()
        )
        if moves is None:
            return None
        through = {one.name: one for view in chains.values() for one in view.nodes}
        nodes = (*through.values(), node)
        if len(roots) == 1 and _is_identity(moves, form, self.forms[roots[0]]):
            return Move.of(nodes, {"x": roots[0]}, form)
        by_role = {f"x{number}": root for number, root in enumerate(roots)}
        memory = {
            role: next(v.tensor for v in chains.values() if v.root == root) for role, root in by_role.items()
        }
        try:
            problem = copy_problem(moves, memory, form.elements, form.dtype)
        except UnsupportedError:  # more dimensions or sources than the copy kernel supports
            return None
        return None if problem is None else Move.of(nodes, by_role, form)

    def _has_memory(self, name: str) -> bool:
        """Return True if a value is in the plan's memory, or will be once its own node becomes a kernel."""
        if self.choices.has_memory(name):
            return True
        node = self.graph.nodes[name]
        if self.choices.of(node).is_alias:
            return self._has_memory(node.inputs["x"])
        return self.is_pytorch_move(node) and self.as_kernel(node) is not None


def _is_identity(moves: Sequence[ElementMove], form: Form, root: Form) -> bool:
    """Return True if the result's bytes are exactly the root's, in the same order."""
    if len(moves) != 1 or moves[0].reversed or form.bytes != root.bytes:
        return False
    (one,) = moves
    steps = zip(one.source.shape, one.source.stride(), one.target.stride(), strict=True)
    # Equal size and strides imply equal start: the view covers the whole root.
    return all(size == 1 or before == after for size, before, after in steps)
