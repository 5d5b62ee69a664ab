"""A graph operator: all that the engine knows about one kind of node.

An operator is a class in a file of its own, registered in `escalade.engine.nodes`. It says how it is recognised among
PyTorch's operators, what it computes, which of Escalade's operations does it, and what passes and plans may do with it.
They ask these traits and never an operator's name, so that a new one needs no change elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeGuard

import torch

from escalade.engine.graph.graph import Graph, Input, Node, Shape
from escalade.engine.nodes.affine import channel_map
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.lowering import Beside, Concatenated, Forms, Lowered, Moved, Taken
from escalade.engine.nodes.signature import RESULT, Attributes, Signature, Sizes
from escalade.ops.base.dtypes import E4M3
from escalade.ops.expressions import IDENTITY, Expression
from escalade.ops.shared.activation import finished

Tensors = Mapping[str, torch.Tensor]
Recognised = Node | str | None
"""The known node, the value that the result is the same as, or None: PyTorch does it."""
Recogniser = Callable[[Node, AtenCall, Graph], Recognised]
RELU = Expression.apply("relu", "x")
MOST_CALLS = 64
"""Functions that a layer takes behind its own: what a kernel has registers for."""


@dataclass(frozen=True)
class Layouts:
    """How an operator wants the images that it reads, and how its own then lies."""

    read: str | None
    """`nhwc`, or `nchw` for PyTorch's order of dimensions; None: each as it lies."""
    written: str

    @staticmethod
    def of_all(given: Mapping[str, str]) -> Layouts:
        """One layout for all: that of the values that it reads, NHWC if any of them has it."""
        one = "nhwc" if "nhwc" in given.values() or not given else "nchw"
        return Layouts(one, one)


ROWS_OF_LAST = Layouts("nchw", "nchw")
"""What operators over the last dimension want."""


class Operator(ABC):
    """One kind of node. The defaults are those of an elementwise operator that PyTorch does."""

    name: ClassVar[str]
    """What nodes, files and explanations call it."""
    signature: ClassVar[Signature | None] = None
    """What its nodes look like; None for those that only passes make, which no file holds."""

    # How it is recognised.

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        """What recognises it in a captured graph, by the names of PyTorch's operators."""
        return {}

    @property
    def folded(self) -> Mapping[str, Recogniser]:
        """What recognises it once constants are computed: layers whose weights the model computes."""
        return {}

    def recognise_rest(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        """What it makes of a captured call that no operator takes by its name."""
        return None

    def fuse(self, graph: Graph, dtype: str) -> None:  # noqa: B027  (most have nothing to do)
        """Puts the operator in the place of several nodes, for any batch size, where its kernels can do them all."""

    def fuse_for_batch(self, graph: Graph, dtype: str) -> None:  # noqa: B027
        """Does so in a graph whose sizes are numbers, for what pays at some batch sizes only."""

    def fuse_step(self, graph: Graph) -> None:  # noqa: B027
        """Does so in the graph of a training step, whose weights are values."""

    def fuse_joined(self, graph: Graph) -> None:  # noqa: B027
        """Does so in such a graph where pointwise neighbours are one node."""

    # What it computes.

    @abstractmethod
    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        """The result by PyTorch: for constants, for plans without a GPU, and to compare with."""

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        """The sizes that inputs and the result (`y`) must have, given those that they have; others are free."""
        return dict.fromkeys((*sizes, RESULT), sizes["x"])

    # Who does it.

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        """The operation of Escalade's that does a node of floating-point numbers; None: PyTorch does it."""
        return None

    # What passes and plans ask.

    values: ClassVar[tuple[str, ...]] = ("x", "shortcut", "residual")
    """The roles of what it has from other nodes. All else are constants, which its kernels may read early."""
    takes_expressions: ClassVar[bool] = False
    """Whether its kernels apply any expression of their result on the way out."""
    takes_any_rank: ClassVar[bool] = False
    """Whether it does the same with dimensions of one more or less behind the channels."""
    mixes_types: ClassVar[bool] = False
    """Whether its kernels read values of other floating types than that of the result, each as its form says."""
    computes_in_fp32: ClassVar[bool] = False
    """Whether its kernels compute in fp32 whatever type they read and write, and round once."""
    is_addition: ClassVar[bool] = False
    """Whether it is x + residual, which an operator in front may take."""
    is_view: ClassVar[bool] = False
    """Whether the result is its input's elements, in PyTorch's order, with other sizes."""
    is_image_scaling: ClassVar[bool] = False
    """Whether it is a scale and a shift of an image's channels, which whatever converts the image may do."""

    def as_image(self, node: Node) -> Attributes | None:
        """The attributes of a node of sequences where these are images one row high; None if it does not take them."""
        is_one = self.takes_any_rank or self.expression(node) is not None
        return node.attributes if is_one else None

    def expression(self, node: Node) -> Expression | None:
        """What a pointwise node computes of each element, in the roles of its inputs, which are broadcast as PyTorch
        does; None if it is none.
        """
        return None

    def takes(self, node: Node, expression: Expression) -> bool:
        """Whether a node can apply an expression in `x`, its own result, on the way out; and in `residual`, which it
        then does not add, where it can have one."""
        known = {"x", "residual"} if self.takes_residual(node) else {"x"}
        return (
            self.takes_expressions and known >= set(expression.inputs) and len(expression.calls) <= MOST_CALLS
        )

    def takes_residual(self, node: Node) -> bool:
        """Whether a node's kernels add a value on the way out, before anything else."""
        return False

    def applied(self, node: Node) -> Expression:
        """What a node applies to its own result, in `x`."""
        return (
            RELU if node.attributes.get("relu") else Expression.parse(node.attributes.get("activation", "x"))
        )

    def applying(self, node: Node, expression: Expression) -> Node:
        """The node with another expression that it takes in the place of the one it applies."""
        plain = {key: value for key, value in node.attributes.items() if key != "activation"}
        own = {} if expression in (IDENTITY, RELU) else {"activation": expression.text}
        return replace(node, attributes={**plain, "relu": expression == RELU, **own})

    def is_mean_of_pixels(self, node: Node) -> bool:
        """Whether every pixel of the result is a mean of some of x, all channels alike."""
        return False

    def is_map_of_pixels(self, node: Node, graph: Graph) -> bool:
        """Whether every pixel of the result is one of x, its channels multiplied by a weight, and a bias."""
        return False

    def windows_of_maxima(self, node: Node) -> tuple[int, int] | None:
        """The rows and columns of windows, side by side without gaps, that the result has the maxima of in x, if it is
        nothing but these, in floating-point numbers of x's type."""
        return None

    def taking_maxima(self, node: Node, pool: Node, windows: tuple[int, int]) -> Node | None:
        """The node that gives what a pool does of its result, and under that one's name, if there is one."""
        return None

    def side_by_side(self, nodes: Sequence[Node], graph: Graph) -> Node | None:
        """The node that gives the results of several, which read the same values and have the same attributes, one
        after the other along their channels, if there is one."""
        return None

    def preparing(
        self, node: Node, expression: Expression, operands: Mapping[str, str], graph: Graph
    ) -> Node | None:
        """The node that does an expression of x itself on the way in, if there is one: in `x`, in `gain` and
        `shift`, constants by channel, and in `gate`, a value by image and channel, which `operands` names."""
        return None

    def channel_scale(self, node: Node, graph: Graph, axis: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """In float64, the factor and the term along an axis of the one value that is no constant, if the node is such
        a map, which weights can hold."""
        expression = self.expression(node)
        return None if expression is None else channel_map(expression, node, graph, axis)

    def is_weight(self, node: Node, role: str) -> bool:
        """Whether an input is the weight, bias or statistic of a layer, which has to be finite, and no operand."""
        if self.signature is None:
            return role not in self.values
        taken = self.signature.role(role)
        return taken is not None and taken.constant

    def scaled_axis(self, node: Node) -> int | None:
        """The axis of the result along which factors and terms can go into its weight and bias, if there is one."""
        return None

    def scaled_weight(self, node: Node, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The weight, in float64, that makes results so many times as large along that axis."""
        return weight.double() * scale.view(-1, *[1] * (weight.dim() - 1))

    def zeros_around(self, node: Node) -> tuple[int, int] | None:
        """Rows and columns of zeros on either side of x, if the result is x with nothing but these around it."""
        return None

    def padded(self, node: Node, zeros: tuple[int, int]) -> Node | None:
        """The node that adds so many rows and columns of zeros on either side of x itself, if there is one."""
        return None

    def feature_constants(self, node: Node) -> tuple[str, ...]:
        """The roles of all constants by feature of x, if reordering them is as good as reordering the features."""
        return ()

    def pads_channels(self, node: Node) -> bool:
        """Whether x may have more channels, of zeros, and its weight as many more."""
        return False

    def fp8_weights(self, node: Node) -> Mapping[str, str]:
        """If there are kernels in FP8: the roles of its weights, each with that of the value it is multiplied with."""
        return {}

    def takes_image_as_it_comes(self, node: Node, image: Input) -> bool:
        """Whether its kernels read an input in whichever layout it comes, with the normalisation done on the way."""
        return False

    def takes_image_type(self, dtype: torch.dtype, storage: torch.dtype) -> bool:
        """Whether its kernels read an image of this type in a plan that stores values in `storage`."""
        return dtype is storage

    def normalises(self, node: Node) -> bool:
        """Whether it does what `normalize=` asks for, so that x may be of uint8."""
        return False

    def is_product_of_planes(self, node: Node, graph: Graph) -> bool:
        """Whether its result, in PyTorch's order, is a matrix times the planes of x, which PyTorch does as they lie."""
        return False

    def left_to_pytorch(self, node: Node) -> str:
        """Why PyTorch does a node that kernels do elsewhere, in a sentence; nothing where they do it."""
        return ""

    def layout(self, node: Node) -> str:
        """How the result lies in memory."""
        if len(node.shape) != 4 or not node.is_floating:
            return "flat"
        return node.attributes.get("layout", "nhwc")

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        """How images have to lie for it, and how its result then does, given how they lie by role."""
        return Layouts("nhwc", "nhwc")

    def before_permute(self, node: Node, order: tuple[int, ...], graph: Graph) -> Node | None:
        """The node that does the same in front of a permutation of all that it reads, if there is one.

        `node` reads the permuted values; the result reads them as they were, permuted it is what `node` gives. Names of
        values are the caller's business, constants the operator's.
        """
        return None

    def channels_taken(self, node: Node) -> tuple[int, ...] | None:
        """The channels of the image x that the result's are, if it is nothing but those."""
        return None

    def reading_channels(
        self, node: Node, order: tuple[int, ...], channels: int, graph: Graph
    ) -> Node | None:
        """The node that does the same where x has so many channels, of which `order` are those that it has now; its
        weights know which these are."""
        return None

    def before_channels(self, node: Node, order: tuple[int, ...], channels: int, graph: Graph) -> Node | None:
        """The node that does the same in front of taking the channels `order` of x, which then has so many; None where
        a channel of the result is more than a function of that of x."""
        return None

    def writing_channels(self, node: Node, order: tuple[int | None, ...], graph: Graph) -> Node | None:
        """The node whose result has these channels of what it has now, and zeros for None."""
        return None

    def stored_type(self, node: Node, storage: torch.dtype, is_output: bool) -> torch.dtype:
        """The type that the result has in memory, in a plan that stores values in `storage`."""
        if node.attributes.get("store") == "fp8":
            return E4M3
        return storage if node.is_floating else getattr(torch, node.dtype)

    def is_alias(self, node: Node, forms: Forms) -> bool:
        """Whether the result is its input's bytes."""
        return self.is_view

    def beside(self, node: Node) -> Beside | None:
        """Whose kernels write the result beside their own, if it is nothing but that."""
        return None

    def further(self, node: Node, inputs: Tensors) -> Tensors:
        """What its kernels can write besides the result, by the names of their buffers, computed by PyTorch."""
        return {}

    def may_share(self, node: Node) -> bool:
        """Whether the result may be a view of an input where PyTorch computes it."""
        return self.is_view

    def constants_in_pytorch(self, node: Node) -> Mapping[str, str]:
        """The form of each constant input, by role, where PyTorch does the node; `STORED` unless said."""
        return {}

    def concatenated(self, node: Node) -> Concatenated | None:
        """What the result is made of, if it is nothing but other values side by side."""
        return None

    def taken(self, node: Node) -> Taken | None:
        """Where the result lies in x, if it is nothing but a range of it."""
        return None

    def moved(self, node: Node, inputs: Tensors, result: torch.Tensor) -> Sequence[Moved] | None:
        """What of the inputs goes where in the result, all of them tensors without contents that lie as they are to, if
        it is made of nothing else. Whatever PyTorch has a view of, it has the strides of."""
        if not self.may_share(node) or len(inputs) != 1:
            return None
        (x,) = inputs.values()
        seen = self.compute(node, inputs)
        return (Moved(seen, result),) if seen.shape == result.shape and is_view_of(seen, x) else None

    def repeated(self, node: Node) -> str | None:
        """The role of a value, if the result may be nothing but that one repeated along dimensions: it is where the
        sizes in these are one."""
        return None

    def is_exact(self, node: Node) -> bool:
        """Whether PyTorch's result is made of single elements of the inputs, and of no sums."""
        moves = self.may_share(node) or self.concatenated(node) is not None
        return moves or self.expression(node) is not None

    def is_random(self, node: Node) -> bool:
        """Whether the result is another each time."""
        return False

    def disregarded(self, node: Node) -> frozenset[str]:
        """The roles of inputs whose values do not count, only their types and sizes do."""
        return frozenset()

    def title(self, node: Node) -> str:
        """What a reader calls the operation."""
        return self.name

    # Nodes of this operator.

    @classmethod
    def matches(cls, node: Node | None) -> TypeGuard[Node]:
        """Whether there is a node and it is one of these."""
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
        """A new node, which the model has nothing of."""
        return Node(name, cls.name, inputs, attributes, shape, dtype)

    @classmethod
    def instead_of(cls, node: Node, inputs: Mapping[str, str | None], **attributes: Any) -> Node:
        """A node of this operator in another's place; inputs that are None are left out."""
        given = {role: name for role, name in inputs.items() if name is not None}
        return replace(node, op=cls.name, inputs=given, attributes=attributes)


def is_view_of(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether one tensor's elements are some of another's, where they are, also of tensors without contents."""
    same = tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
    return same and tensor.dtype == other.dtype and tensor.is_neg() == other.is_neg()


def with_channels(node: Node, channels: int) -> Node:
    """A node that does with each channel what it does now, of so many channels."""
    return replace(node, shape=(node.shape[0], channels, *node.shape[2:]))


def spread(
    tensor: torch.Tensor, axis: int, order: tuple[int, ...], size: int, rest: float = 0.0
) -> torch.Tensor:
    """A tensor of another size along an axis, whose elements `order` along it are those of the given one."""
    shape = list(tensor.shape)
    shape[axis] = size
    return tensor.new_full(shape, rest).index_copy(axis, torch.tensor(order), tensor)


def is_reordering(order: tuple[int, ...], channels: int) -> bool:
    """Whether these are all of so many channels, each once."""
    return sorted(order) == [*range(channels)]


def unpermuted(node: Node, order: tuple[int, ...]) -> Node:
    """A node over single elements with the sizes that it has in front of a permutation."""
    shape = tuple(size for _, size in sorted(zip(order, node.shape, strict=True), key=lambda pair: pair[0]))
    return replace(node, shape=shape)


def finish(node: Node, y: torch.Tensor, inputs: Tensors) -> torch.Tensor:
    """The way out of a layer: the residual added, then what the node applies, if it has them."""
    return activate(node, y, inputs.get("residual"))


def activate(node: Node, y: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """What a node does with its sums by PyTorch: the residual, if there is one, and what it applies."""
    return finished(node.attributes["relu"], node.attributes.get("activation", ""), y, residual)


def activation_of(node: Node) -> dict[str, Any]:
    """What a node applies to its result, as attributes of a node or fields of a problem."""
    return {"relu": node.attributes["relu"], "activation": node.attributes.get("activation", "")}
