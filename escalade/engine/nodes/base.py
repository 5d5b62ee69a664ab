"""Graph operators: everything the engine knows about one kind of node.

An operator is a class that is registered in `escalade.engine.nodes`. It matches calls of PyTorch's operators, computes
its result with PyTorch, and lowers a node to a problem of one of Escalade's operations. Fusions are rules in
`escalade.engine.passes`, which match operators by their classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar, TypeGuard, TypeVar

import torch

from escalade.engine.graph.graph import Graph, Node, Reference, Shape
from escalade.engine.nodes.lowering import ElementMove, Forms, Lowered
from escalade.engine.nodes.signature import Attributes, Signature, Sizes
from escalade.ops.expressions import IDENTITY, Expression
from escalade.ops.shared.activation import finished

Tensors = Mapping[str, torch.Tensor]
Match = Node | str | None
"""A node of ours, the name of the value that a no-op returns, or None: PyTorch runs the call."""
Matcher = Callable[[Node, "AtenCall", Graph], Match]
_Method = TypeVar("_Method", bound=Callable[..., Match])
RELU = Expression.apply("relu", "x")
CAPTURE, FOLDED, UNFUSED, VOLUMES = "capture", "folded", "unfused", "volumes"
"""Phases of matching: while a model is captured; after constants are folded, for layers with computed weights; in a
training step, for what losses have not been fused with; and for volumes, once the dtype is known that decides whether
they are NDHWC."""


class AtenCall:
    """Arguments of a PyTorch operator by name; tensors as the names of their values."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._arguments = node.attributes["arguments"]

    def __call__(self, name: str, default: Any = None) -> Any:
        value = self._arguments.get(name, default)
        return default if value is None else value

    def value(self, name: str) -> str | None:
        """Return the name of a tensor argument; None if it is absent or not a tensor."""
        found = self._arguments.get(name)
        return self._node.inputs[found.role] if isinstance(found, Reference) else None

    def pair(self, name: str, default: int | Sequence[int]) -> tuple[int, int]:
        """Return an argument for height and width, which may be given once for both."""
        value = self(name, default)
        if not isinstance(value, int) and not value:  # an empty list means the default
            value = default
        values = (value,) if isinstance(value, int) else tuple(value)
        return (values[0], values[-1])

    def converts(self, x: str, graph: Graph) -> bool:
        """Return True if the call asks for another dtype than its operand has.

        CUDA's autocast passes fp32 to every sum, norm and softmax, even of values that are fp32 already.
        """
        wanted = self("dtype")
        return wanted is not None and wanted is not graph.dtype_of(x)


@dataclass(frozen=True)
class MatchRule:
    """PyTorch operator that a method of a graph operator matches."""

    name: str
    phases: Collection[str]
    sequence: tuple[str, ...]
    """For an operator on sequences: names of its image and weight arguments, which are viewed as images."""


def match_aten(
    *names: str, phases: Collection[str] = (CAPTURE,), sequence: tuple[str, ...] = ()
) -> Callable[[_Method], _Method]:
    """Mark a method as the matcher of PyTorch operators with these names, without namespace `aten` and overload."""

    def mark(method: _Method) -> _Method:
        rules = [MatchRule(name, phases, sequence) for name in names]
        setattr(method, "rules", [*getattr(method, "rules", ()), *rules])  # noqa: B010
        return method

    return mark


@dataclass(frozen=True)
class Layouts:
    """Layouts of the images that a node reads and writes."""

    read: str | None
    """`nhwc`, or `nchw` for PyTorch's order of dimensions; None: any, each as it is stored."""
    written: str

    @staticmethod
    def common(given: Mapping[str, str]) -> Layouts:
        """Return one layout for all: NHWC if any operand has it."""
        layout = "nhwc" if "nhwc" in given.values() or not given else "nchw"
        return Layouts(layout, layout)


class Operator(ABC):
    """One kind of node. The defaults describe a layer on NHWC images that PyTorch computes."""

    name: ClassVar[str]
    """Name in nodes, files and explanations."""
    signature: ClassVar[Signature | None] = None
    """Inputs and attributes of its nodes; None for nodes that only passes create, which no file contains."""
    values: ClassVar[tuple[str, ...]] = ("x", "shortcut", "residual")
    """Roles of inputs that other nodes compute. The others are constants, which kernels may prefetch."""

    # Properties of its kernels.

    preferred_layout: ClassVar[str | None] = "nhwc"
    """Layout of the images that it reads and writes; None: any, the same for all."""
    takes_expressions: ClassVar[bool] = False
    """True if kernels apply any expression to their result before storing it."""
    mixes_types: ClassVar[bool] = False
    """True if kernels read values of other floating dtypes than that of the result."""
    fp32_roles: ClassVar[tuple[str, ...]] = ()
    """Roles of inputs that kernels read in fp32, whatever the dtype of the result."""
    computes_in_fp32: ClassVar[bool] = False
    """True if kernels compute in fp32 and round once, in whichever dtype they read and write."""
    raw_image_channels: ClassVar[int] = 0
    """Input images of up to this many channels are read in any layout, and normalized by the kernel."""
    image_dtypes: ClassVar[Collection[torch.dtype] | None] = ()
    """Dtypes besides the plan's in which kernels read input images; None: all."""

    takes_casts: ClassVar[bool] = False
    """True if kernels read every one of `values` and write the result in any floating dtypes, and compute in fp32."""

    # Properties of the operator.

    takes_any_rank: ClassVar[bool] = False
    """True if dimensions may be inserted or removed after the channels."""
    is_view: ClassVar[bool] = False
    """True if the result has its input's elements, in PyTorch's order, in another shape."""

    @abstractmethod
    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        """Compute the result with PyTorch: for constants, for plans without a GPU, and as a reference."""

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        """Return the shapes that inputs and the result (`y`) must have, given those they have, where PyTorch does not
        check them all: kernels of a file's graph must not read beyond them. Raises SizeError.

        Roles that are missing may have any shape. If the result is missing, it must have the shape that `compute`
        returns.
        """
        return {}

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        """Return the problem of Escalade's that computes a node; None: PyTorch computes it.

        The result is floating-point, or indices if the signature says so.
        """
        return None

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        """Return the layouts of images that a node reads and writes, given those of its operands by role."""
        layout = self.preferred_layout
        return Layouts.common(given) if layout is None else Layouts(layout, layout)

    def expression(self, node: Node) -> Expression | None:
        """Return the expression of a pointwise node in the roles of its broadcast inputs; None for other nodes."""
        return None

    def takes_residual(self, node: Node) -> bool:
        """Return True if kernels can add a value to their result, before anything else."""
        return False

    def side_outputs(self, node: Node, inputs: Tensors) -> Tensors:
        """Compute with PyTorch what kernels write besides the result, by the names of their buffers."""
        return {}

    def is_alias(self, node: Node, forms: Forms) -> bool:
        """Return True if the result has the same bytes as its input, so that nothing has to run."""
        return self.is_view

    def may_alias(self, node: Node) -> bool:
        """Return True if PyTorch's result may be a view of an input."""
        return self.is_view

    def element_moves(
        self, node: Node, inputs: Tensors, result: torch.Tensor
    ) -> Sequence[ElementMove] | None:
        """Return the copies that make up the result, if it is nothing else; all tensors are meta tensors.

        For views, PyTorch itself computes the strides.
        """
        if not self.may_alias(node) or len(inputs) != 1:
            return None
        (x,) = inputs.values()
        view = self.compute(node, inputs)
        is_view = view.shape == result.shape and is_view_of(view, x)
        return (ElementMove(view, result),) if is_view else None

    def pytorch_constants(self, node: Node) -> Mapping[str, str]:
        """Return the form of constants, by role, for PyTorch's computation; `STORED` for the others."""
        return {}

    def title(self, node: Node) -> str:
        """Return the name that explanations show."""
        return self.name

    # Nodes of this operator.

    @classmethod
    def matches(cls, node: Node | None) -> TypeGuard[Node]:
        """Return True if a node exists and has this operator."""
        return node is not None and node.op == cls.name

    @classmethod
    def node(
        cls,
        name: str,
        inputs: Mapping[str, str],
        attributes: Attributes,
        shape: Shape,
        dtype: str = "float32",
    ) -> Node:
        """Return a new node, without a source in the model."""
        return Node(name, cls.name, inputs, attributes, shape, dtype)

    @classmethod
    def instead_of(cls, node: Node, inputs: Mapping[str, str | None], **attributes: Any) -> Node:
        """Return a node of this operator with another one's name and shape; inputs that are None are left out."""
        given = {role: name for role, name in inputs.items() if name is not None}
        return replace(node, op=cls.name, inputs=given, attributes=attributes)

    def rules(self, phase: str) -> Iterator[tuple[MatchRule, Matcher]]:
        """Yield the rules for a phase with the methods that `match_aten` marks."""
        for attribute in dir(type(self)):
            for rule in getattr(getattr(type(self), attribute, None), "rules", ()):
                if phase in rule.phases:
                    yield rule, getattr(self, attribute)


def is_view_of(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if a tensor is a view of another one; works for meta tensors too."""
    is_shared = tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
    return is_shared and tensor.dtype == other.dtype and tensor.is_neg() == other.is_neg()


def with_channels(node: Node, channels: int) -> Node:
    """Return a per-channel node for another number of channels."""
    return replace(node, shape=(node.shape[0], channels, *node.shape[2:]))


# Activations: a node applies ReLU if its attribute `relu` is set, else the expression in its attribute `activation`.


def activation_of(node: Node) -> Expression:
    """Return the expression that a node applies to its result `x`, and to its `residual` if that is not just added."""
    return RELU if node.attributes.get("relu") else Expression.parse(node.attributes.get("activation", "x"))


def with_activation(node: Node, expression: Expression) -> Node:
    """Return the node with another activation."""
    plain = {key: value for key, value in node.attributes.items() if key != "activation"}
    own = {} if expression in (IDENTITY, RELU) else {"activation": expression.text}
    return replace(node, attributes={**plain, "relu": expression == RELU, **own})


def activation_fields(node: Node) -> dict[str, Any]:
    """Return a node's activation as attributes of a node or fields of a problem."""
    return {"relu": node.attributes["relu"], "activation": node.attributes.get("activation", "")}


def activate(
    node: Node, y: torch.Tensor, residual: torch.Tensor | None = None, vectors: Tensors = MappingProxyType({})
) -> torch.Tensor:
    """Add the residual, if there is one, and apply the node's activation, with PyTorch."""
    return finished(node.attributes["relu"], node.attributes.get("activation", ""), y, residual, vectors)
