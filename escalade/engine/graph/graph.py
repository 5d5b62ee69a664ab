"""A network as data: nodes over named values, with shapes that may depend on the batch.

Capture makes a graph, passes rewrite it, a plan chooses kernels for it. Nodes name their inputs by role
(`x`, `weight`, `residual`, …), the names that the kernels' recipes use for their buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Batch:
    """A size that grows with the batch: `times` for each item."""

    times: int = 1


Dimension = int | Batch
Shape = tuple[Dimension, ...]

ATEN = "aten"
"""The op of a node that PyTorch does: its attributes name the operator and hold its arguments."""

READ, WRITTEN = "read", "written"
"""Attributes of such a node in a typed graph: `nchw` if an image that it read when it was captured lay in PyTorch's
order, and if its result did where none of these was."""

ORDERS = "orders"
"""Attribute of such a node in a typed graph: by role, the order of dimensions in memory (outermost first) of each
operand that was captured in another order than PyTorch's. The call hands the operator the strides of capture."""


@dataclass(frozen=True)
class Reference:
    """A value among the arguments of an `aten` node: the role under which the node's inputs name it."""

    role: str


@dataclass(frozen=True)
class Node:
    """One operation; its result is the value of the same name."""

    name: str
    op: str
    inputs: Mapping[str, str]
    attributes: Mapping[str, Any]
    shape: Shape
    dtype: str
    """The result's: a floating type up to 32 bits means the plan's own, whatever it is, unless the graph is typed.
    float64 is always meant: no kernel computes in it, so PyTorch does."""
    source: str = ""
    """The place in the model that it comes from, such as `layer1.0.conv1`."""

    def with_inputs(self, **changed: str | None) -> Node:
        """This node with these inputs changed; None takes one away."""
        merged = {**self.inputs, **changed}
        return replace(self, inputs={role: name for role, name in merged.items() if name is not None})

    def with_attributes(self, **changed: Any) -> Node:
        return replace(self, attributes={**self.attributes, **changed})

    @property
    def is_floating(self) -> bool:
        return getattr(torch, self.dtype).is_floating_point

    @property
    def depends_on_batch(self) -> bool:
        """Whether its sizes or its arguments grow with the batch."""
        leaves: list[object] = []
        map_leaves(leaves.append, (self.attributes, self.shape))
        return any(isinstance(leaf, Batch) for leaf in leaves)


@dataclass(frozen=True)
class Input:
    """What the caller gives."""

    name: str
    shape: Shape
    dtype: str


class Nodes(dict[str, Node]):
    """Nodes by name, which know who reads each value."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        super().__init__()
        self.readers: dict[str, dict[str, None]] = {}
        """The names of the nodes that read each value, in no order."""
        self.update(nodes)

    def __setitem__(self, name: str, node: Node) -> None:
        self._forget(name)
        for value in node.inputs.values():
            self.readers.setdefault(value, {})[name] = None
        super().__setitem__(name, node)

    def __delitem__(self, name: str) -> None:
        self._forget(name)
        super().__delitem__(name)

    def update(self, nodes: Mapping[str, Node]) -> None:  # type: ignore[override]
        for name, node in nodes.items():
            self[name] = node

    def _forget(self, name: str) -> None:
        node = self.get(name)
        for value in () if node is None else node.inputs.values():
            self.readers[value].pop(name, None)


@dataclass
class Graph:
    """Inputs, constants and nodes in the order in which they can run."""

    inputs: tuple[Input, ...]
    nodes: dict[str, Node]
    constants: dict[str, torch.Tensor]
    outputs: tuple[str, ...]
    structure: pytree.TreeSpec = field(default_factory=lambda: pytree.tree_structure(None))
    """How the outputs are given back."""
    arguments: pytree.TreeSpec = field(default_factory=lambda: pytree.tree_structure(((None,), {})))
    """How the caller gives the inputs: in order, and by name."""
    parameters: tuple[str, ...] = ()
    """What the model calls the arguments that are given in order, as they may be given by name too; those that it takes
    in order alone have no name."""
    output_types: tuple[str, ...] = ()
    """The element types that the model itself returns."""
    batches: tuple[int, int | None] = (1, None)
    """The smallest and the largest batch for which the model does just this; None: any."""
    changes_inputs: bool = False
    """Whether the model writes to what it is given; an engine never does."""
    ranges: Mapping[str, float] = field(default_factory=dict)
    """The largest magnitude of each value of the fused graph, as seen in calibration, for FP8."""
    typed: bool = False
    """Whether floating types are meant: a training step has weights in fp32 and products in 16 bits."""
    images: str = "nchw"
    """How images come: in PyTorch's order, or all of them in `nhwc`, and then they are returned as they lie."""
    weight_names: Mapping[str, str] = field(default_factory=dict)
    """What constants are called in the model, where the graph has other names for them."""
    notes: list[str] = field(default_factory=list)
    """What passes have to say to the user."""
    is_sound: bool = True
    """Whether its sizes are right for every batch by its making; those of a file are checked for each."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, Nodes(value) if name == "nodes" else value)

    def __iter__(self) -> Iterator[Node]:
        """Nodes in order, each as it is by then: the graph may be rewritten on the way."""
        for name in tuple(self.nodes):
            if name in self.nodes:
                yield self.nodes[name]

    def copy(self) -> Graph:
        """Nodes are frozen and constants are not written to, so a shallow copy is enough."""
        return replace(self, nodes=dict(self.nodes), constants=dict(self.constants), notes=list(self.notes))

    @property
    def device(self) -> torch.device:
        """Where its constants are, or the largest of them."""
        largest = max(self.constants.values(), key=torch.Tensor.numel, default=None)
        return torch.device("cpu") if largest is None else largest.device

    def users(self) -> dict[str, list[Node]]:
        """The nodes that read each value, in order."""
        found: dict[str, list[Node]] = {}
        for node in self:
            for name in dict.fromkeys(node.inputs.values()):
                found.setdefault(name, []).append(node)
        return found

    def readers(self, name: str) -> list[Node]:
        """The nodes that read a value, in no order."""
        nodes = self.nodes
        assert isinstance(nodes, Nodes)
        return [nodes[reader] for reader in nodes.readers.get(name, ())]

    def only_user(self, name: str) -> Node | None:
        """Return the node that reads a value through a single input, if nothing else uses the value.

        A node that reads it twice, such as a convolution that adds its own input, is not returned: a pass that
        replaces one of the two reads must not remove the value.
        """
        if name in self.outputs:
            return None
        readers = self.readers(name)
        is_single = len(readers) == 1 and tuple(readers[0].inputs.values()).count(name) == 1
        return readers[0] if is_single else None

    def shape_of(self, name: str) -> Shape:
        if name in self.nodes:
            return self.nodes[name].shape
        if name in self.constants:
            return tuple(self.constants[name].shape)
        return next(given.shape for given in self.inputs if given.name == name)

    def dtype_of(self, name: str) -> torch.dtype:
        """Floating types but float64 stand for the plan's own, unless the graph is typed."""
        if name in self.constants:
            return self.constants[name].dtype
        if name in self.nodes:
            return getattr(torch, self.nodes[name].dtype)
        return getattr(torch, next(given.dtype for given in self.inputs if given.name == name))

    def fresh(self, name: str) -> str:
        """A name that nothing has yet."""
        taken = {given.name for given in self.inputs}
        number, candidate = 1, name
        while candidate in self.nodes or candidate in self.constants or candidate in taken:
            number += 1
            candidate = f"{name}_{number}"
        return candidate

    def add_constant(self, name: str, tensor: torch.Tensor) -> str:
        name = self.fresh(name)
        self.constants[name] = tensor
        return name

    def replace_uses(self, old: str, new: str) -> None:
        """Makes whoever reads `old` read `new`."""
        for node in self:
            if old in node.inputs.values():
                changed = {role: new if name == old else name for role, name in node.inputs.items()}
                self.nodes[node.name] = replace(node, inputs=changed)
        self.outputs = tuple(new if name == old else name for name in self.outputs)

    def remove(self, node: Node, instead: str) -> None:
        """Takes a node out; its users read `instead`."""
        self.replace_uses(node.name, instead)
        del self.nodes[node.name]

    def insert_before(self, place: str, node: Node) -> None:
        self._rebuild(n for old in self for n in ((node, old) if old.name == place else (old,)))

    def append(self, node: Node) -> None:
        self.nodes[node.name] = node

    def remove_dead_code(self) -> None:
        """Drops nodes and constants that no output depends on."""
        needed = set(self.outputs)
        for node in reversed(tuple(self)):
            if node.name in needed:
                needed.update(node.inputs.values())
            else:
                del self.nodes[node.name]
        self.constants = {name: tensor for name, tensor in self.constants.items() if name in needed}

    def _rebuild(self, nodes: Iterable[Node]) -> None:
        self.nodes = {node.name: node for node in nodes}

    def at(self, batch: int) -> Graph:
        """This graph for one batch size: every size a number."""
        return replace(
            self.copy(),
            inputs=tuple(replace(given, shape=fixed(given.shape, batch)) for given in self.inputs),
            nodes={
                node.name: replace(
                    node,
                    shape=fixed(node.shape, batch),
                    attributes=map_leaves(lambda leaf: _fix(leaf, batch), node.attributes),
                )
                for node in self
            },
        )

    @property
    def is_batched(self) -> bool:
        """Whether it works for other batch sizes than the one that it was captured with."""
        return any(isinstance(size, Batch) for given in self.inputs for size in given.shape)


def _fix(leaf: Any, batch: int) -> Any:
    return leaf.times * batch if isinstance(leaf, Batch) else leaf


def fixed(shape: Shape, batch: int) -> tuple[int, ...]:
    return tuple(_fix(size, batch) for size in shape)


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """Attributes are trees of dicts, lists and tuples; lists come back as tuples."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(change, value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return tuple(map_leaves(change, value) for value in tree)
    return change(tree)
