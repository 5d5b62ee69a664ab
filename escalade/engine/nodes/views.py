"""Views: reshapes, permutations, slices and concatenations, and sequences (NCL) viewed as images (NCHW) of one row.

Where the plan can place values accordingly, none of these runs anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from escalade.engine.graph.graph import ATEN, Graph, Node, Reference, Shape
from escalade.engine.nodes.aten import fill_value
from escalade.engine.nodes.base import (
    AtenCall,
    Layouts,
    Match,
    Matcher,
    Operator,
    Tensors,
    match_aten,
)
from escalade.engine.nodes.lowering import ElementMove, Forms, Lowered
from escalade.engine.nodes.movement import SOURCES, lower_moves
from escalade.engine.nodes.signature import (
    ANY,
    INDEX,
    RESULT,
    ROWS,
    Attribute,
    Attributes,
    Signature,
    SizeError,
    Sizes,
)
from escalade.ops.pad2d import PAD2D, Pad2dProblem

Order = tuple[int, ...]
CHANNELS_LAST: Order = (0, 2, 3, 1)
"""Permutation from an image to rows of channels."""
CHANNELS_FIRST: Order = (0, 3, 1, 2)
FRAMES_ORDER: Order = (0, 2, 1, 3, 4)
"""Permutation from volumes to frames of channels, and back."""
SEQUENCE_RANK, _IMAGE_RANK, VOLUME_RANK = 3, 4, 5


class Reshape(Operator):
    """The elements of x in another shape; the layout pass stores x accordingly."""

    name = "reshape"
    signature = Signature({"x": ANY}, {}, floating=False)
    is_view = True

    @match_aten(
        "flatten",
        "unflatten",
        "view",
        "reshape",
        "squeeze",
        "unsqueeze",
        "_unsafe_view",
        "view_as",
        "reshape_as",
    )
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        x = call.value("self") or call.value("input")
        assert x is not None
        if call.converts(x, graph):
            return None  # a view of the bytes as another dtype
        return x if graph.shape_of(x) == node.shape else self.instead_of(node, {"x": x})

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        """Return PyTorch's order; images of one pixel count as NHWC, in which their channels can be sliced."""
        read = "nhwc" if node.attributes.get("order") == "nhwc" else "nchw"
        return Layouts(read, "nhwc" if node.shape[2:] == (1, 1) else "nchw")

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        x = inputs["x"]
        if node.attributes.get("order") == "nhwc":
            x = x.permute(CHANNELS_LAST)
        return x.reshape(node.shape)  # type: ignore[arg-type]

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        x, result = sizes["x"], sizes[RESULT]
        if math.prod(x) != math.prod(result):
            raise SizeError(f"{list(x)} and {list(result)} have different numbers of elements")
        return {}


def _is_order(value: Any) -> bool:
    is_tuple = type(value) is tuple and all(type(dim) is int for dim in value)
    return is_tuple and sorted(value) == [*range(len(value))]


class Permute(Operator):
    """Dimension i of the result is dimension order[i] of x."""

    name = "permute"
    signature = Signature({"x": ANY}, {"order": Attribute("every dimension once", _is_order)}, floating=False)

    @match_aten("permute", "transpose", "swapaxes", "swapdims", "t", "numpy_T", "mT", "adjoint")
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        """Match a permutation, merged with a preceding one."""
        x, order = call.value("self"), self._called_order(node, call)
        if x is None or order is None:
            return None
        before = graph.nodes.get(x)
        if self.matches(before):
            x, order = before.inputs["x"], tuple(before.attributes["order"][dim] for dim in order)
        return x if order == tuple(range(len(order))) else self.instead_of(node, {"x": x}, order=order)

    @staticmethod
    def _called_order(node: Node, call: AtenCall) -> Order | None:
        """Return the order of dimensions that PyTorch's operator gives its operand."""
        rank = len(node.shape)
        order = [*range(rank)]
        match node.calls.removesuffix("_"):
            case "permute":
                return tuple(dim % rank for dim in call("dims", ()))
            case "t" | "numpy_T":
                order.reverse()
            case "mT" | "adjoint":
                if rank < 2 or getattr(torch, node.dtype).is_complex:  # whose adjoint is conjugate
                    return None
                order[-2:] = reversed(order[-2:])
            case _ if rank:
                names = ("dim0", "dim1") if call("dim0") is not None else ("axis0", "axis1")
                first, second = (call(name) % rank for name in names)
                order[first], order[second] = order[second], order[first]
        return tuple(order)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return inputs["x"].permute(node.attributes["order"])

    def may_alias(self, node: Node) -> bool:
        return True

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        is_image = given.get("x") == "nchw" and node.attributes["order"] == CHANNELS_FIRST
        return Layouts(None, "nhwc" if is_image else "nchw")

    def is_alias(self, node: Node, forms: Forms) -> bool:
        source, target = forms.value(node.inputs["x"]), forms.value(node.name)
        if source.dtype != target.dtype:
            return False
        moved = source.meta_tensor().permute(node.attributes["order"])
        strides = zip(moved.shape, moved.stride(), target.meta_tensor().stride(), strict=True)
        return all(size == 1 or before == after for size, before, after in strides)


class _AlongDimension(Operator):
    """A slice of another value along `dimension`, or a concatenation of such slices."""

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        """Return NHWC along channels, which are then contiguous; along other dimensions images stay as they are."""
        return Layouts("nhwc", "nhwc") if node.attributes["dimension"] == 1 else Layouts.common(given)


class Slice(_AlongDimension):
    """Contiguous range of x along `dimension`, starting at `first`; the result's size is its length."""

    name = "slice"
    signature = Signature({"x": ROWS}, {"dimension": INDEX, "first": INDEX})

    @match_aten("slice", "narrow")
    def _match_range(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        return self._from(node, call, graph, call("start", 0)) if call("step", 1) == 1 else None

    @match_aten(
        "split", "split_with_sizes", "chunk", "unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes"
    )
    def _match_split(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        """Match one part of a split; all but the last have the same size unless sizes are given."""
        index, x, dim = node.attributes.get("result", 0), call.value("self"), call("dim", 0)
        if x is None or not isinstance(dim, int):
            return None
        whole, own = graph.shape_of(x)[dim], node.shape[dim]
        sizes = call("split_sizes", call("split_size"))
        if isinstance(sizes, tuple):
            if not all(isinstance(size, int) for size in sizes):
                return None
            return self._from(node, call, graph, list(accumulate(sizes, initial=0))[index])
        if not isinstance(whole, int) or not isinstance(own, int):
            return None
        each = sizes if isinstance(sizes, int) else -(-whole // call("chunks", 1))
        return self._from(node, call, graph, index * each)

    @match_aten("select")
    def _match_select(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        """Match a step of a sequence, or a row or column of an image; of other dimensions PyTorch's view is as good."""
        x, dim, index = call.value("self"), call("dim", 0), call("index")
        if x is None or x in graph.constants or not node.is_floating:
            return None
        sizes = graph.shape_of(x)
        if len(sizes) not in (SEQUENCE_RANK, _IMAGE_RANK):
            return None
        if not isinstance(dim, int) or not isinstance(index, int):
            return None
        dim %= len(sizes)
        whole = sizes[dim]
        if dim < 2 or not isinstance(whole, int):
            return None
        if whole > 1:
            attributes = {"dimension": dim, "first": index % whole}
            shape = (*sizes[:dim], 1, *sizes[dim + 1 :])
            x = graph.add(self.node(f"{node.name}_part", {"x": x}, attributes, shape, node.dtype))
        return Reshape.instead_of(node, {"x": x})

    def _from(self, node: Node, call: AtenCall, graph: Graph, start: object) -> Match:
        x, dim = call.value("self"), call("dim", 0)
        if x is None or x in graph.constants or not node.is_floating or not isinstance(dim, int):
            return None
        sizes, dim = graph.shape_of(x), dim % len(node.shape)
        if sizes == node.shape:
            return x
        whole = sizes[dim]
        if not isinstance(start, int) or not isinstance(whole, int) or not isinstance(node.shape[dim], int):
            return None  # a range of the batch
        first = min(max(start + whole if start < 0 else start, 0), whole)
        return self.instead_of(node, {"x": x}, dimension=dim, first=first)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        dim, first = node.attributes["dimension"], node.attributes["first"]
        return inputs["x"].narrow(dim, first, node.shape[dim])

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        x, result, dim, first = sizes["x"], sizes[RESULT], attributes["dimension"], attributes["first"]
        if len(x) != len(result) or dim >= len(x) or first + result[dim] > x[dim]:
            raise SizeError(f"{list(result)} from index {first} of dimension {dim} is not within {list(x)}")
        return {RESULT: (*x[:dim], result[dim], *x[dim + 1 :])}

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        """Return rows or columns of an image as negative padding."""
        form, dim = forms.value(node.inputs["x"]), node.attributes["dimension"]
        if len(form.shape) != 4 or dim < 2 or not form.elements:
            return None
        first, length = node.attributes["first"], forms.value(node.name).shape[dim]
        fewer = (-first, first + length - form.shape[dim])
        pads = (*fewer, 0, 0) if dim == 2 else (0, 0, *fewer)
        return Lowered(PAD2D, Pad2dProblem(*form.shape, pads, "constant", 0.0, forms.stored, form.layout))

    def may_alias(self, node: Node) -> bool:
        return True


class Concatenate(_AlongDimension):
    """x0, x1, … along `dimension`; in other dimensions, operands of size 1 are expanded."""

    name = "concatenate"
    signature = Signature({}, {"dimension": INDEX}, repeated=ROWS)
    values = SOURCES

    @match_aten("cat", "concat", "concatenate")
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        tensors, dim = call("tensors", ()), call("dim", 0)
        if not node.is_floating or not isinstance(dim, int):
            return None
        if not all(isinstance(one, Reference) for one in tensors):
            return None
        dim %= len(node.shape)
        names = [_unexpanded(node.inputs[one.role], dim, graph) for one in tensors]
        are_supported = all(
            len(graph.shape_of(name)) == len(node.shape)
            and graph.dtype_of(name).is_floating_point
            and not (graph.typed and name in graph.constants)
            for name in names
        )
        if not are_supported or graph.constants.keys() >= {*names}:
            return None
        if len(names) == 1:
            return names[0] if graph.shape_of(names[0]) == node.shape else None
        inputs: dict[str, str | None] = {f"x{number}": name for number, name in enumerate(names)}
        return self.instead_of(node, inputs, dimension=dim)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        dim = node.attributes["dimension"]
        parts = (inputs[role] for role in _roles(node))
        return torch.cat([part.expand(_part_shape(node.shape, dim, part.shape)) for part in parts], dim)  # type: ignore[arg-type]

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        result, dim = sizes[RESULT], attributes["dimension"]
        parts = {role: size for role, size in sizes.items() if role != RESULT}
        if set(parts) != {f"x{number}" for number in range(len(parts))}:
            raise SizeError(f"inputs are {', '.join(parts)}; expected them numbered from x0")
        if dim >= len(result) or any(len(size) != len(result) for size in parts.values()):
            raise SizeError(f"inputs have another rank than {list(result)}, or it has no dimension {dim}")
        whole = sum(size[dim] for size in parts.values())
        expanded = {
            role: tuple(
                1 if own == 1 else other
                for own, other in zip(size, _part_shape(result, dim, size), strict=True)
            )
            for role, size in parts.items()
        }
        return {RESULT: (*result[:dim], whole, *result[dim + 1 :]), **expanded}  # type: ignore[dict-item]

    def element_moves(self, node: Node, inputs: Tensors, result: torch.Tensor) -> list[ElementMove]:
        """Return a move per part; if the plan writes other parts in place, only of those named in `moved`."""
        first, moves, dim, roles = 0, [], node.attributes["dimension"], _roles(node)
        for role in roles:
            part = inputs[role]
            length = part.shape[dim]
            if role in node.attributes.get("moved", roles):
                target = result.narrow(dim, first, length)
                moves.append(ElementMove(part.expand(target.shape), target))
            first += length
        return moves

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        """Return one copy of all parts that cannot be written in place."""
        return lower_moves(self, node, forms)


def _part_shape(shape: Shape, dim: int, part: Shape) -> Shape:
    """Return the shape that an operand of a concatenation is expanded to."""
    return (*shape[:dim], part[dim], *shape[dim + 1 :])


def _unexpanded(name: str, dim: int, graph: Graph) -> str:
    """Return what a concatenation reads for an operand: the source of an expansion, a constant for a filled tensor."""
    node, number, shape = graph.nodes.get(name), fill_value(name, graph), graph.shape_of(name)
    if node is None or node.op != ATEN or graph.typed or node.dtype == "float64":
        return name
    length = shape[dim]
    if number is not None and isinstance(length, int):
        sizes = [length if axis == dim else 1 for axis in range(len(shape))]
        return graph.add_constant(f"{name}_fill", torch.full(sizes, number, device=graph.device))
    if node.calls not in ("expand", "expand_as", "broadcast_to"):
        return name
    source = node.inputs[node.attributes["arguments"]["self"].role]
    own = graph.shape_of(source)
    padded = (1,) * (len(shape) - len(own)) + own
    if graph.dtype_of(source) is not graph.dtype_of(name) or padded[dim] != shape[dim]:
        return name
    if padded != own:
        source = graph.add(Reshape.node(f"{name}_source", {"x": source}, {}, padded, node.dtype))
    return _unexpanded(source, dim, graph)


def concatenated_values(node: Node) -> list[str]:
    """Return the values that a concatenation joins, in order."""
    return [node.inputs[role] for role in _roles(node)]


def _roles(node: Node) -> list[str]:
    return [f"x{number}" for number in range(len(node.inputs))]


_ACROSS = {"padding": 0, "output_padding": 0}
"""Window arguments across the one row; 1 for the others."""
_WINDOWED = ("kernel_size", "stride", "padding", "output_padding", "dilation")


def image_shape(shape: Shape) -> Shape:
    """Return the shape of a sequence as an image."""
    return (*shape[:2], 1, *shape[2:])


def on_sequences(matcher: Matcher, x: str, weight: str | None = None) -> Matcher:
    """Return a matcher of layers on sequences by that of images; `x` and `weight` are names of arguments."""

    def match(node: Node, call: AtenCall, graph: Graph) -> Match:
        operand = call.value(x)
        kernel = call.value(weight) if weight else None
        if operand is None or len(node.shape) != SEQUENCE_RANK or (weight and kernel not in graph.constants):
            return None
        shape = image_shape(graph.shape_of(operand))
        image = Reshape.node(graph.fresh(f"{node.name}_row"), {"x": operand}, {}, shape, node.dtype)
        inputs = {role: image.name if name == operand else name for role, name in node.inputs.items()}
        if kernel is not None:
            filters = graph.derive_constant(f"{node.name}_weight", kernel, lambda kernel: kernel.unsqueeze(2))
            inputs = {role: filters if name == kernel else name for role, name in inputs.items()}
        arguments = {key: _image_argument(key, value) for key, value in node.attributes["arguments"].items()}
        viewed = replace(
            node,
            name=graph.fresh(f"{node.name}_image"),
            inputs=inputs,
            shape=image_shape(node.shape),
            attributes={**node.attributes, "arguments": arguments},
        )
        graph.append(image)
        made = matcher(viewed, AtenCall(viewed), graph)
        if not isinstance(made, Node):
            graph.remove(image, instead=operand)
            return None
        graph.append(made)
        return Reshape.instead_of(node, {"x": made.name})

    return match


def _image_argument(name: str, value: Any) -> Any:
    """Return an argument along a sequence as one of a window of one row."""
    if name not in _WINDOWED or value is None or isinstance(value, str) or value == ():
        return value
    if not isinstance(value, int) and len(value) > 1:
        return value  # pads before and after a sequence are those of a row, too
    (along,) = (value,) if isinstance(value, int) else tuple(value)
    return (_ACROSS.get(name, 1), along)
