"""The graph: nodes over named values, with shapes that may depend on the batch size.

Capture creates a graph, passes rewrite it, and a plan chooses kernels for it. Nodes name their inputs by role (`x`,
`weight`, `residual`, …), the names that kernel recipes use for their buffers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class Batch:
    """A size of `times` the batch size."""

    times: int = 1


Dimension = int | Batch
Shape = tuple[Dimension, ...]
DeriveConstant = Callable[[torch.Tensor], torch.Tensor]

ATEN = "aten"
"""Op of a node that PyTorch runs; its attributes are the operator's name and arguments."""

# Attributes of such a node in a typed graph. READ is `nchw` if it read an NCHW image in capture; WRITTEN is `nchw` if
# it read none, but its result was one. ORDERS has, by role, the memory order (outermost dimension first) of each
# operand that was not contiguous in capture; the call passes the operator operands with those strides.
READ, WRITTEN = "read", "written"
ORDERS = "orders"


@dataclass(frozen=True)
class Reference:
    """Placeholder for a value among the arguments of an `aten` node, by its role in the node's inputs."""

    role: str


@dataclass(frozen=True)
class Node:
    """An operation; its result is the value of the same name."""

    name: str
    op: str
    inputs: Mapping[str, str]
    attributes: Mapping[str, Any]
    shape: Shape
    dtype: str
    """Type of the result. Unless the graph is typed, a floating type up to 32 bits means the plan's dtype. float64 is
    exact: no kernel computes in it, so PyTorch does."""
    source: str = ""
    """Module path in the model, such as `layer1.0.conv1`."""

    def with_inputs(self, **changed: str | None) -> Node:
        """Return the node with these inputs changed; None removes one."""
        merged = {**self.inputs, **changed}
        return replace(self, inputs={role: name for role, name in merged.items() if name is not None})

    def with_attributes(self, **changed: Any) -> Node:
        return replace(self, attributes={**self.attributes, **changed})

    def roles_of(self, value: str) -> list[str]:
        """Return the roles in which the node reads a value."""
        return [role for role, name in self.inputs.items() if name == value]

    @property
    def calls(self) -> str:
        """Name of the PyTorch operator that the node calls, without namespace and overload; empty for other nodes."""
        return name_of(self.attributes["target"]) if self.op == ATEN else ""

    @property
    def is_floating(self) -> bool:
        return getattr(torch, self.dtype).is_floating_point

    @property
    def depends_on_batch(self) -> bool:
        """True if its shape or an attribute is a multiple of the batch size."""
        leaves: list[object] = []
        map_leaves(leaves.append, (self.attributes, self.shape))
        return any(isinstance(leaf, Batch) for leaf in leaves)


@dataclass(frozen=True)
class Input:
    name: str
    shape: Shape
    dtype: str


class NodeTable(dict[str, Node]):
    """Nodes by name, with an index of the readers of each value."""

    def __init__(self, nodes: Mapping[str, Node]) -> None:
        super().__init__(nodes)
        self.readers: dict[str, dict[str, None]] = {}
        """Names of the nodes that read each value, as an unordered set."""
        for name, node in nodes.items():
            for value in node.inputs.values():
                self.readers.setdefault(value, {})[name] = None

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

    def arrange(self, ordered: Mapping[str, Node]) -> None:
        """Replace the nodes by these, in this order; the index of readers changes only by those that differ."""
        for name in self.keys() - ordered.keys():
            del self[name]
        for name, node in ordered.items():
            if self.get(name) is not node:
                self[name] = node
        super().clear()
        super().update(ordered)

    def insert_before(self, before: str, node: Node) -> None:
        """Add a node in front of another one; the index of readers only grows by it."""
        names = list(self)
        after = {name: self[name] for name in names[names.index(before) :]}
        for name in after:
            super().__delitem__(name)
        self[node.name] = node
        super().update(after)

    def _forget(self, name: str) -> None:
        node = self.get(name)
        for value in () if node is None else node.inputs.values():
            self.readers[value].pop(name, None)


KEPT = "kept in fp16: "


@dataclass(frozen=True)
class CalibratedValue:
    """Effect of quantizing a value with its range."""

    largest: float
    """Largest magnitude seen."""
    saturated: float
    """Share of the elements beyond the range."""
    snr_db: float
    """Ratio of the value's power to that of the quantization error, in decibels."""
    cost: float | None = None
    """Relative error of the network's results if only this layer is quantized; None if it was not measured."""


@dataclass
class Graph:
    """Inputs, constants and nodes in topological order."""

    inputs: tuple[Input, ...]
    nodes: dict[str, Node]
    constants: dict[str, torch.Tensor]
    outputs: tuple[str, ...]
    structure: pytree.TreeSpec = field(default_factory=lambda: pytree.tree_structure(None))
    """Structure of the results."""
    arguments: pytree.TreeSpec = field(default_factory=lambda: pytree.tree_structure(((None,), {})))
    """Structure of the positional and keyword arguments."""
    parameters: tuple[str, ...] = ()
    """Names of the positional arguments, which may be passed by keyword too; empty for positional-only ones."""
    output_types: tuple[str, ...] = ()
    """Element types that the model itself returns."""
    batches: tuple[int, int | None] = (1, None)
    """Smallest and largest batch size that the graph is valid for; None: unbounded."""
    writes_inputs: bool = False
    """True if the model writes to its inputs; an engine never does."""
    ranges: Mapping[str, float] = field(default_factory=dict)
    """Range of each value of the fused graph, for quantized dtypes. Keys that begin with `KEPT` name layers of the
    model that stay in 16 bits."""
    calibrated: Mapping[str, CalibratedValue] = field(default_factory=dict)
    """Calibration results of the values with a range; not saved."""
    means: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Mean of each channel of the values that layers read, by which biases are corrected; empty: they are not."""
    typed: bool = False
    """True if floating types are exact: a training step has weights in fp32 and products in 16 bits."""
    images: str = "nchw"
    """Layout of input images. With `nhwc`, output images are returned in the layout they are computed in."""
    weight_names: Mapping[str, str] = field(default_factory=dict)
    """Name in the model of each constant that is a parameter or buffer."""
    derived: dict[str, tuple[str, DeriveConstant | None]] = field(default_factory=dict)
    """Constants that the capture computed from another: its name, and how (None for graphs from files)."""
    fixed_weights: frozenset[str] = frozenset()
    """Names in the model of weights whose values the capture read: other values might give another graph."""
    state_shapes: Mapping[str, tuple[int, ...]] | None = None
    """Shapes of the entries of the model's state dict, whether the graph reads them or not; None if not known."""
    notes: list[str] = field(default_factory=list)
    """Messages to the user."""
    is_trusted: bool = True
    """False for graphs from files, whose sizes are checked for each batch size."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, NodeTable(value) if name == "nodes" else value)

    def __iter__(self) -> Iterator[Node]:
        """Yield nodes in order, in their current state; the graph may be rewritten during iteration."""
        for name in tuple(self.nodes):
            if name in self.nodes:
                yield self.nodes[name]

    def copy(self) -> Graph:
        """Return a shallow copy: nodes are frozen, and passes never write to constants."""
        return replace(
            self,
            nodes=dict(self.nodes),
            constants=dict(self.constants),
            derived=dict(self.derived),
            notes=list(self.notes),
        )

    @property
    def device(self) -> torch.device:
        """Device of the largest constant."""
        largest = max(self.constants.values(), key=torch.Tensor.numel, default=None)
        return torch.device("cpu") if largest is None else largest.device

    def users(self) -> dict[str, list[Node]]:
        """Return the nodes that read each value, in order."""
        users: dict[str, list[Node]] = {}
        for node in self:
            for name in dict.fromkeys(node.inputs.values()):
                users.setdefault(name, []).append(node)
        return users

    def readers(self, name: str) -> list[Node]:
        """Return the nodes that read a value, in no particular order."""
        nodes = self.nodes
        assert isinstance(nodes, NodeTable)
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
        return next(entry.shape for entry in self.inputs if entry.name == name)

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a value; see `Node.dtype`."""
        if name in self.constants:
            return self.constants[name].dtype
        if name in self.nodes:
            return getattr(torch, self.nodes[name].dtype)
        return getattr(torch, next(entry.dtype for entry in self.inputs if entry.name == name))

    def fresh(self, name: str) -> str:
        """Return an unused name, `name` itself if possible."""
        input_names = {entry.name for entry in self.inputs}
        number, candidate = 1, name
        while candidate in self.nodes or candidate in self.constants or candidate in input_names:
            number += 1
            candidate = f"{name}_{number}"
        return candidate

    def add_constant(self, name: str, tensor: torch.Tensor) -> str:
        name = self.fresh(name)
        self.constants[name] = tensor
        return name

    def add_constants(self, owner: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """Add constants of a node, and return their names by role."""
        return {role: self.add_constant(f"{owner}_{role}", tensor) for role, tensor in tensors.items()}

    def derive_constant(self, name: str, source: str, derive: DeriveConstant) -> str:
        """Add a constant computed from another one, and record how, for when the weights are replaced."""
        made = self.add_constant(name, derive(self.constants[source]))
        self.derived[made] = (source, derive)
        return made

    def replace_uses(self, old: str, new: str) -> None:
        """Let all readers of `old`, and the outputs, read `new`."""
        for node in self.readers(old):
            changed = {role: new if name == old else name for role, name in node.inputs.items()}
            self.nodes[node.name] = replace(node, inputs=changed)
        self.outputs = tuple(new if name == old else name for name in self.outputs)

    def remove(self, node: Node, instead: str) -> None:
        """Remove a node; its users read `instead`."""
        self.replace_uses(node.name, instead)
        del self.nodes[node.name]

    def insert_before(self, before: str, node: Node) -> None:
        assert isinstance(self.nodes, NodeTable)
        self.nodes.insert_before(before, node)

    def arrange(self, nodes: Iterable[Node]) -> None:
        """Replace the nodes by these, in this order."""
        assert isinstance(self.nodes, NodeTable)
        self.nodes.arrange({node.name: node for node in nodes})

    def append(self, node: Node) -> None:
        self.nodes[node.name] = node

    def add(self, node: Node, before: str | None = None) -> str:
        """Add a node under an unused name, last or in front of another one; return the name."""
        named = replace(node, name=self.fresh(node.name))
        if before is None:
            self.append(named)
        else:
            self.insert_before(before, named)
        return named.name

    def remove_dead_code(self) -> None:
        """Remove nodes and constants that no output depends on."""
        needed = set(self.outputs)
        for node in reversed(tuple(self)):
            if node.name in needed:
                needed.update(node.inputs.values())
            else:
                del self.nodes[node.name]
        self.constants = {name: tensor for name, tensor in self.constants.items() if name in needed}

    def at(self, batch: int) -> Graph:
        """Return the graph with fixed sizes for one batch size."""
        return replace(
            self.copy(),
            inputs=tuple(replace(entry, shape=fixed_shape(entry.shape, batch)) for entry in self.inputs),
            nodes={
                node.name: replace(
                    node,
                    shape=fixed_shape(node.shape, batch),
                    attributes=map_leaves(lambda leaf: _at_batch(leaf, batch), node.attributes),
                )
                for node in self
            },
        )

    @property
    def is_batched(self) -> bool:
        """True if the graph is valid for other batch sizes than that of its capture."""
        return any(isinstance(size, Batch) for entry in self.inputs for size in entry.shape)


def _at_batch(leaf: Any, batch: int) -> Any:
    return leaf.times * batch if isinstance(leaf, Batch) else leaf


def fixed_shape(shape: Shape, batch: int) -> tuple[int, ...]:
    return tuple(_at_batch(size, batch) for size in shape)


def product(sizes: Sequence[Dimension]) -> Dimension:
    """Return the product of sizes, of which the first may depend on the batch."""
    first, *others = sizes or (1,)
    number = math.prod(others)  # type: ignore[arg-type]
    return Batch(first.times * number) if isinstance(first, Batch) else first * number


def joint_source(*nodes: Node) -> str:
    """Return the sources of nodes that are fused into one."""
    return ", ".join(dict.fromkeys(node.source for node in nodes if node.source))


def name_of(target: str) -> str:
    """Return an operator's name without namespace and overload: `add` for `aten::add.Tensor`."""
    return target.removeprefix("aten::").split(".")[0]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def map_leaves(change: Callable[[Any], Any], tree: Any) -> Any:
    """Map the leaves of nested dicts, lists and tuples; lists become tuples."""
    if isinstance(tree, Mapping):
        return {key: map_leaves(change, value) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return tuple(map_leaves(change, value) for value in tree)
    return change(tree)
