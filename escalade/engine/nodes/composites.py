"""PyTorch operators written as calls of other operators, which have nodes or kernels already.

A composite is used in inference only: passes over training steps match PyTorch's own gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from escalade.engine.graph.aten import resolve_operator
from escalade.engine.graph.graph import Graph, Node, Reference, Shape, map_leaves, product
from escalade.engine.nodes.base import AtenCall, Match, Matcher
from escalade.engine.nodes.movement import ATEN_MOVES
from escalade.engine.nodes.views import FRAMES_ORDER, Reshape
from escalade.errors import EscaladeError

Capture = Callable[[Node, torch._ops.OpOverload, Graph], Node | str]
"""Matches a captured call: `matching.match_captured`."""


class _NotComposed(EscaladeError):
    """A call of the composition has no node; PyTorch then computes the original operator as a whole."""


@dataclass(frozen=True)
class _Value:
    """A value among the arguments of a call."""

    name: str


class Calls:
    """Calls that replace one call of the model, each matched as if the model had made it."""

    def __init__(self, node: Node, graph: Graph, capture: Capture) -> None:
        self.node, self.graph, self._capture = node, graph, capture
        self.given = AtenCall(node)

    def value(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Return a floating operand of the call and its shape, of which the first size may depend on the batch."""
        value = self.given.value(name)
        _require(value is not None and self.node.is_floating)
        assert value is not None
        shape = self.graph.shape_of(value)
        _require(
            self.graph.dtype_of(value).is_floating_point and all(type(size) is int for size in shape[1:])
        )
        return value, shape  # type: ignore[return-value]

    def __call__(self, target: str, shape: Shape, /, **arguments: Any) -> str:
        """Append a call and return its result; arguments that are values are given as `_Value`."""
        inputs: dict[str, str] = {}

        def leaf(argument: Any) -> Any:
            if not isinstance(argument, _Value):
                return argument
            inputs[f"in{len(inputs)}"] = argument.name
            return Reference(f"in{len(inputs) - 1}")

        attributes = {"target": f"aten::{target}", "arguments": map_leaves(leaf, arguments)}
        name = self.graph.fresh(self.node.name)
        call = replace(self.node, name=name, inputs=inputs, attributes=attributes, shape=shape)
        operator = resolve_operator(attributes["target"])
        assert operator is not None
        made = self._capture(call, operator, self.graph)
        if isinstance(made, str):
            return made
        _require(made.calls in ("", "matmul", *ATEN_MOVES))
        self.graph.append(made)
        return made.name

    def reshape(self, value: str, shape: Shape) -> str:
        while Reshape.matches(before := self.graph.nodes.get(value)):
            value = before.inputs["x"]
        return self("reshape", shape, self=_Value(value), shape=shape)


Composite = Callable[[Calls], str]


def _require(holds: bool) -> None:
    if not holds:
        raise _NotComposed("PyTorch computes it")


def composite_matcher(composite: Composite, capture: Capture) -> Matcher:
    """Return a matcher that writes an operator as other calls, or leaves the graph as it was."""

    def match(node: Node, call: AtenCall, graph: Graph) -> Match:
        if graph.typed:
            return None
        nodes, constants = set(graph.nodes), set(graph.constants)
        try:
            return composite(Calls(node, graph, capture))
        except _NotComposed:
            for name in [name for name in graph.nodes if name not in nodes]:
                del graph.nodes[name]
            for name in graph.constants.keys() - constants:
                del graph.constants[name]
            return None

    return match


def _with(shape: Sequence[Any], dim: int, size: Any) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _glu(calls: Calls) -> str:
    x, shape = calls.value("self")
    dim = calls.given("dim", -1) % len(shape)
    _require(dim > 0)
    half = _with(shape, dim, shape[dim] // 2)
    ends = ((0, half[dim]), (half[dim], shape[dim]))
    first, gate = (
        calls("slice.Tensor", half, self=_Value(x), dim=dim, start=start, end=end, step=1)
        for start, end in ends
    )
    gate = calls("sigmoid", half, self=_Value(gate))
    return calls("mul.Tensor", half, self=_Value(first), other=_Value(gate))


def _norm(calls: Calls) -> str:
    """Compose a norm of vectors, or the Frobenius norm of matrices."""
    x, shape = calls.value("self")
    dim, order = calls.given("dim"), calls.given("ord")
    dims = (dim,) if isinstance(dim, int) else tuple(dim or ())
    is_matrix = calls.node.calls == "linalg_matrix_norm"
    if is_matrix:
        order, dims = order or "fro", dims or (-2, -1)
    _require(order in (None, "fro") or (len(dims) == 1 and isinstance(order, int | float)))
    return calls(
        "linalg_vector_norm", calls.node.shape, self=_Value(x), ord=2 if order in (None, "fro") else order,
        dim=dims or tuple(range(len(shape))), keepdim=calls.given("keepdim", False), dtype=calls.given("dtype"),
    )  # fmt: skip


def _cosine_similarity(calls: Calls) -> str:
    (first, shape), (second, other) = calls.value("x1"), calls.value("x2")
    _require(shape == other)
    dim = calls.given("dim", 1) % len(shape)
    unit = []
    for value in (first, second):
        norm = calls(
            "linalg_vector_norm", _with(shape, dim, 1), self=_Value(value), ord=2, dim=(dim,), keepdim=True,
        )  # fmt: skip
        bounded = calls("clamp_min", _with(shape, dim, 1), self=_Value(norm), min=calls.given("eps", 1e-8))
        unit.append(calls("div.Tensor", shape, self=_Value(value), other=_Value(bounded)))
    terms = calls("mul.Tensor", shape, self=_Value(unit[0]), other=_Value(unit[1]))
    return calls("sum.dim_IntList", calls.node.shape, self=_Value(terms), dim=(dim,), keepdim=False)


@dataclass(frozen=True)
class _Contraction:
    """A sum of products of two values: a letter for each dimension of both and of the result, as in an einsum."""

    values: tuple[str, str]
    labels: tuple[str, str]
    result: str
    sizes: Mapping[str, Any]

    @staticmethod
    def of_einsum(calls: Calls) -> _Contraction:
        operands = calls.given("tensors", ())
        equation = str(calls.given("equation", "")).replace(" ", "")
        inputs, arrow, result = equation.partition("->")
        labels = inputs.split(",")
        _require(len(operands) == len(labels) == 2 and bool(arrow) and "." not in equation)
        first, second = (calls.node.inputs[one.role] for one in operands)
        return _Contraction.of(calls, (first, second), (labels[0], labels[1]), result)

    @staticmethod
    def of(calls: Calls, values: tuple[str, str], labels: tuple[str, str], result: str) -> _Contraction:
        _require(all(len({*each}) == len(each) for each in (*labels, result)))
        shapes = [calls.graph.shape_of(value) for value in values]
        _require(calls.node.is_floating and len({calls.graph.dtype_of(value) for value in values}) == 1)
        pairs = [*zip(labels[0], shapes[0], strict=True), *zip(labels[1], shapes[1], strict=True)]
        sizes = dict(pairs)
        _require(all(sizes[label] == size for label, size in pairs) and sizes.keys() >= {*result})
        return _Contraction(values, labels, result, sizes)

    def shape(self, labels: str) -> Shape:
        return tuple(self.sizes[label] for label in labels)

    def parts(self) -> tuple[str, str, str, str]:
        """Return the labels of a batched matrix product: batch, rows, summed, and columns.

        Rows are of the first operand, and columns of the second. Labels of one operand alone are not summed.
        """
        first, second = self.labels
        batch = "".join(one for one in first if one in second and one in self.result)
        summed = "".join(one for one in first if one in second and one not in self.result)
        rows, columns = ("".join(one for one in own if one not in batch + summed) for own in (first, second))
        _require({*rows, *columns} <= {*self.result})
        return batch, rows, summed, columns


def _einsum(calls: Calls) -> str:
    """Compose a product of two operands of which one has all dimensions, then a sum; else a matrix product."""
    contraction = _Contraction.of_einsum(calls)
    (first, second), result = contraction.labels, contraction.result
    large = 0 if {*first} >= {*second} else 1
    whole, factor = contraction.labels[large], contraction.labels[1 - large]
    constants = calls.graph.constants
    if {*whole} >= {*factor, *result} and contraction.values[large] not in constants:
        return _weighted_sum(calls, contraction, large)
    _require(not constants.keys() & {*contraction.values})  # which may be a layer, after folding
    return _matrix_product(calls, contraction)


def _weighted_sum(calls: Calls, contraction: _Contraction, large: int) -> str:
    """Compose a product with a value that is broadcast, then a sum."""
    small, sizes, result = 1 - large, contraction.sizes, contraction.result
    values, whole, own = contraction.values, contraction.labels[large], contraction.labels[small]
    factor = _permuted(calls, values[small], own, "".join(one for one in whole if one in own), sizes)
    factor = calls.reshape(factor, tuple(sizes[one] if one in own else 1 for one in whole))
    terms = calls("mul.Tensor", contraction.shape(whole), self=_Value(values[large]), other=_Value(factor))
    kept = "".join(label for label in whole if label in result)
    if kept != whole:
        dims = tuple(dim for dim, label in enumerate(whole) if label not in result)
        terms = calls("sum.dim_IntList", contraction.shape(kept), self=_Value(terms), dim=dims, keepdim=False)
    return _permuted(calls, terms, kept, result, sizes)


def _matrix_product(calls: Calls, contraction: _Contraction) -> str:
    """Compose a batched matrix product, of which attention consists, and views around it."""
    batch, rows, summed, columns = contraction.parts()
    _require(bool(rows and summed and columns))
    sizes, shape = contraction.sizes, contraction.shape
    operands = []
    for value, own, order in zip(
        contraction.values, contraction.labels, (rows + "," + summed, summed + "," + columns), strict=True
    ):
        moved = _permuted(calls, value, own, batch + order.replace(",", ""), sizes)
        matrix = tuple(product(shape(each)) for each in order.split(","))
        operands.append(calls.reshape(moved, (*shape(batch), *matrix)))
    matrices = (*shape(batch), product(shape(rows)), product(shape(columns)))
    result = calls("matmul", matrices, self=_Value(operands[0]), other=_Value(operands[1]))
    made = batch + rows + columns
    return _permuted(calls, calls.reshape(result, shape(made)), made, contraction.result, sizes)


def _of_matmul(calls: Calls) -> _Contraction:
    """Return the contraction of a matrix and a value of any rank."""
    first, second = calls.given.value("self"), calls.given.value("other")
    _require(first is not None and second is not None)
    assert first is not None and second is not None
    others = _LETTERS[: len(calls.graph.shape_of(second)) - 2]
    _require(len(calls.graph.shape_of(first)) == 2 and bool(others))
    return _Contraction.of(calls, (first, second), ("mk", f"{others}kn"), f"{others}mn")


def _of_tensordot(calls: Calls) -> _Contraction:
    first, second = calls.given.value("self"), calls.given.value("other")
    _require(first is not None and second is not None)
    assert first is not None and second is not None
    ranks = [len(calls.graph.shape_of(value)) for value in (first, second)]
    labels = [list(_LETTERS[: ranks[0]]), list(_LETTERS[ranks[0] : sum(ranks)])]
    pairs = zip(calls.given("dims_self", ()), calls.given("dims_other", ()), strict=True)
    for one, other in pairs:
        labels[1][other] = labels[0][one]
    result = [label for label in (*labels[0], *labels[1]) if (label in labels[0]) != (label in labels[1])]
    return _Contraction.of(calls, (first, second), ("".join(labels[0]), "".join(labels[1])), "".join(result))


_LETTERS = "abcdefghijlopqrstuvwxyz"  # neither k, m nor n


def _layer(contraction_of: Callable[[Calls], _Contraction]) -> Composite:
    """Compose a contraction with a constant as a linear layer over the summed dimensions."""

    def compose(calls: Calls) -> str:
        contraction = contraction_of(calls)
        constants = [value in calls.graph.constants for value in contraction.values]
        _require(sum(constants) == 1)
        at = constants.index(True)
        batch, rows, summed, columns = contraction.parts()
        _require(not batch and bool(summed))
        kept, outputs = (columns, rows) if at == 0 else (rows, columns)
        value, own, weights = contraction.values[1 - at], contraction.labels[1 - at], contraction.labels[at]
        _require(bool(kept))
        sizes, shape = contraction.sizes, contraction.shape
        order = [weights.index(label) for label in outputs + summed]
        matrix = math.prod(shape(outputs)), math.prod(shape(summed))  # type: ignore[arg-type]
        weight = calls.graph.derive_constant(
            f"{calls.node.name}_weight", contraction.values[at],
            lambda constant: constant.permute(order).reshape(matrix).contiguous(),
        )  # fmt: skip
        moved = _permuted(calls, value, own, kept + summed, sizes)
        moved = calls.reshape(moved, (*shape(kept), matrix[1]))
        made = calls(
            "linear", (*shape(kept), matrix[0]), input=_Value(moved), weight=_Value(weight), bias=None
        )
        made = calls.reshape(made, shape(kept + outputs))
        return _permuted(calls, made, kept + outputs, contraction.result, sizes)

    return compose


def _permuted(calls: Calls, value: str, labels: str, wanted: str, sizes: Mapping[str, Any]) -> str:
    if labels == wanted:
        return value
    order = tuple(map(labels.index, wanted))
    return calls("permute", tuple(sizes[label] for label in wanted), self=_Value(value), dims=order)


# Windows over three dimensions, one or two of which are trivial or computed on their own.


def _triple(value: Any, default: Sequence[int]) -> tuple[int, ...]:
    values = (value,) if isinstance(value, int) else tuple(value or default)
    return values * 3 if len(values) == 1 else values


def _pool3d(name: str, by_frame: bool) -> Composite:
    """Compose a pool over images (rows and columns), then over the frames of each pixel.

    In NDHWC the images are frames, in NCDHW each channel of a frame is one.
    """

    def compose(calls: Calls) -> str:
        (x, shape), given = calls.value("self"), calls.given
        _require(len(shape) == 5 and calls.node.attributes.get("result", 0) == 0)
        kernel = _triple(given("kernel_size"), (1,))
        windows = {
            "kernel_size": kernel,
            "stride": _triple(given("stride"), kernel),
            "padding": _triple(given("padding"), (0,)),
        }
        others: dict[str, Any] = {"ceil_mode": given("ceil_mode", False)}
        if name == "max_pool2d":
            windows["dilation"] = _triple(given("dilation"), (1,))
        else:
            others["count_include_pad"] = given("count_include_pad", True)
            others["divisor_override"] = given("divisor_override")
        result: Any = calls.node.shape
        batch, channels, depth, height, width = shape
        steps: list[tuple[Any, ...]] = []
        _require(
            not others.get("divisor_override") or kernel[0] == 1 or kernel[1:] == (1, 1)
        )  # it is of both windows
        if any(value[1:] != _TRIVIAL[key] for key, value in windows.items()):
            sides = {key: value[1:] for key, value in windows.items()}
            if by_frame:
                x = _on_frames(calls, name, "self", x, result[3:], **sides, **others)
            else:
                steps.append((sides, (batch, channels * depth), (height, width), result[3:]))
            height, width = result[3:]
        if any(value[0] != _TRIVIAL[key][0] for key, value in windows.items()):
            along = {key: (value[0], _TRIVIAL[key][0]) for key, value in windows.items()}
            pixels = height * width
            steps.append((along, (batch, channels), (depth, pixels), (result[2], pixels)))
        for window, outer, sizes, pooled in steps:
            image = calls.reshape(x, (*outer, *sizes))
            x = calls(name, (*outer, *pooled), self=_Value(image), **window, **others)
        return calls.reshape(x, result)

    return compose


def _on_frames(calls: Calls, name: str, role: str, x: str, sides: Any, **others: Any) -> str:
    """Call a function of images on the frames of volumes; return volumes, whose frames have these sides."""
    batch, channels, depth, *own = calls.graph.shape_of(x)
    frames = product((batch, depth))
    image = calls("permute", (batch, depth, channels, *own), self=_Value(x), dims=FRAMES_ORDER)
    image = calls.reshape(image, (frames, channels, *own))
    y = calls(name, (frames, channels, *sides), **{role: _Value(image)}, **others)
    y = calls.reshape(y, (batch, depth, channels, *sides))
    return calls("permute", (batch, channels, depth, *sides), self=_Value(y), dims=FRAMES_ORDER)


def _upsample3d(target: str) -> Composite:
    """Compose the resizing of volumes: of their frames, then along them."""

    def compose(calls: Calls) -> str:
        x, shape = calls.value("input" if calls.given.value("input") else "self")
        _require(len(shape) == 5)
        scales = calls.given("scale_factors") or [calls.given(f"scales_{axis}") for axis in "dhw"]
        depth, *sides = calls.node.shape[2:]
        pixels = math.prod(sides)  # type: ignore[arg-type]
        corners = {"align_corners": calls.given("align_corners", False)} if "bilinear" in target else {}

        def sizes(size: tuple[Any, Any], *factors: float | None) -> dict[str, Any]:
            given = None not in factors
            return {"output_size": None if given else size, "scale_factors": factors if given else None}

        within = sizes((sides[0], sides[1]), scales[1], scales[2])
        x = _on_frames(calls, f"{target}.vec", "input", x, tuple(sides), **within, **corners)
        rows = calls.reshape(x, (*shape[:3], pixels))
        made = calls(
            f"{target}.vec", (*shape[:2], depth, pixels),
            input=_Value(rows), **sizes((depth, pixels), scales[0], None if scales[0] is None else 1.0), **corners,
        )  # fmt: skip
        return calls.reshape(made, calls.node.shape)

    return compose


_TRIVIAL = {"kernel_size": (1, 1), "stride": (1, 1), "padding": (0, 0), "dilation": (1, 1)}


def _conv3d(calls: Calls) -> str:
    """Compose a convolution along frames, or within them, of images.

    Its images have a frame's pixels in each row, or one frame each.
    """
    (x, shape), given, graph = calls.value("input"), calls.given, calls.graph
    weight, bias = given.value("weight"), given.value("bias")
    padding = given("padding", 0)
    _require(len(shape) == 5 and weight in graph.constants and (bias or weight) in graph.constants)
    _require(not isinstance(padding, str))
    assert weight is not None
    window = dict(zip(_TRIVIAL_WINDOW, (
        tuple(graph.shape_of(weight)[2:]), _triple(given("stride"), (1,)), _triple(padding, (0,)),
        _triple(given("dilation"), (1,)),
    ), strict=True))  # fmt: skip
    trivial = {key: value for key, value in _TRIVIAL_WINDOW.items() if key != "dilation"}
    result: Any = calls.node.shape
    taps: dict[str, Any]
    image: Shape
    made: Shape
    batch, channels, depth, *sides = shape
    if all(window[key][1:] == (value, value) for key, value in trivial.items()):
        taps = {key: (window[key][0], value) for key, value in _TRIVIAL_WINDOW.items()}
        image, made = (batch, channels, depth, math.prod(sides)), (*result[:3], math.prod(sides))
        axis = 4
    else:
        _require(all(window[key][0] == value for key, value in trivial.items()))
        taps = {key: window[key][1:] for key in _TRIVIAL_WINDOW}
        x = calls("permute", (batch, depth, channels, *sides), self=_Value(x), dims=FRAMES_ORDER)
        frames = product((batch, depth))
        image, made = (frames, channels, *sides), (frames, result[1], *result[3:])
        axis = 2
    taps.pop("kernel_size")
    filters = graph.derive_constant(f"{calls.node.name}_weight", weight, lambda one: one.squeeze(axis))
    y = calls(
        "conv2d", made, input=_Value(calls.reshape(x, image)), weight=_Value(filters),
        bias=None if bias is None else _Value(bias), groups=given("groups", 1), **taps,
    )  # fmt: skip
    if axis == 4:
        return calls.reshape(y, result)
    y = calls.reshape(y, (batch, depth, result[1], *result[3:]))
    return calls("permute", result, self=_Value(y), dims=FRAMES_ORDER)


_TRIVIAL_WINDOW = {"kernel_size": 1, "stride": 1, "padding": 0, "dilation": 1}


def _adaptive_avg_pool3d(calls: Calls) -> str:
    x, shape = calls.value("self")
    _require(len(shape) == 5 and calls.node.shape[2:] == (1, 1, 1))
    return calls("mean.dim", calls.node.shape, self=_Value(x), dim=(2, 3, 4), keepdim=True)


def _upsample1d(target: str) -> Composite:
    """Compose the resizing of sequences as that of images of one row."""

    def compose(calls: Calls) -> str:
        x, shape = calls.value("input" if calls.given.value("input") else "self")
        _require(len(shape) == 3)
        scales = calls.given("scale_factors") or (calls.given("scales"),)
        (batch, channels, length), (*_, resized) = shape, calls.node.shape
        corners = {"align_corners": calls.given("align_corners", False)} if "bilinear" in target else {}
        image = calls(
            f"{target}.vec", (batch, channels, 1, resized),
            input=_Value(calls.reshape(x, (batch, channels, 1, length))),
            output_size=(1, resized) if scales[0] is None else None, **corners,
            scale_factors=None if scales[0] is None else (1.0, scales[0]),
        )  # fmt: skip
        return calls.reshape(image, calls.node.shape)

    return compose


def _constant_pad(calls: Calls) -> str:
    """Compose padding of any dimensions but the first, two adjacent ones at a time as rows and columns of images."""
    x, shape = calls.value("self")
    given, value = calls.given("pad", ()), calls.given("value", 0.0)
    _require(calls.given("mode", "constant") == "constant" and all(type(pad) is int for pad in given))
    pads = {len(shape) - 1 - number: given[2 * number : 2 * number + 2] for number in range(len(given) // 2)}
    dims = sorted(dim for dim, pad in pads.items() if any(pad))
    _require(0 not in dims)
    _require(len(shape) != 4 or dims[:1] < [2])  # else it is an image that no kernel pads
    if len(shape) == 4 and dims[0] == 1 and min(pads[1]) >= 0:
        return _with_channels(calls, x, pads[1], value)
    sizes = list(shape)
    while dims:
        last = dims.pop()
        first = dims.pop() if last - 1 in dims else last
        inner = math.prod(sizes[last + 1 :])
        if first < last:
            outer, image = sizes[:first], (sizes[first], sizes[last] * inner)
            padding = (*(pad * inner for pad in pads[last]), *pads[first])
        else:
            outer, image = sizes[:last], (sizes[last], inner)
            padding = (0, 0, *pads[last])
        viewed = calls.reshape(x, (product(outer), 1, *image))
        for dim in {first, last}:
            sizes[dim] += sum(pads[dim])
        larger = (product(outer), 1, image[0] + sum(padding[2:]), image[1] + sum(padding[:2]))
        x = calls("constant_pad_nd", larger, self=_Value(viewed), pad=padding, value=value)
    return calls.reshape(x, calls.node.shape)


def _with_channels(calls: Calls, x: str, around: Sequence[int], value: float) -> str:
    """Compose padding of images with a constant: channels before and after, rows and columns around."""
    result, given = calls.node.shape, calls.given("pad", ())
    if any(given[:4]):
        channels = calls.graph.shape_of(x)[1]
        x = calls("constant_pad_nd", _with(result, 1, channels), self=_Value(x), pad=given[:4], value=value)
    parts = [x]
    for number, at in zip(around, (0, 2), strict=True):
        if number:
            fill = torch.full((1, number, 1, 1), float(value), device=calls.graph.device)
            parts.insert(at, calls.graph.add_constant(f"{calls.node.name}_fill", fill))
    return calls("cat", result, tensors=tuple(map(_Value, parts)), dim=1)


def _im2col(calls: Calls) -> str:
    """Compose windows of a padded image; without padding they are a view of it."""
    x, shape = calls.value("self")
    padding = calls.given.pair("padding", 0)
    _require(len(shape) == 4 and any(padding))
    rows, columns = padding
    larger = (*shape[:2], shape[2] + 2 * rows, shape[3] + 2 * columns)
    image = calls("constant_pad_nd", larger, self=_Value(x), pad=(columns, columns, rows, rows), value=0.0)
    rest = {key: calls.given.pair(key, 1) for key in ("kernel_size", "dilation", "stride")}
    return calls("im2col", calls.node.shape, self=_Value(image), padding=(0, 0), **rest)


COMPOSITES: Mapping[str, Composite] = {
    "glu": _glu,
    "linalg_norm": _norm,
    "linalg_matrix_norm": _norm,
    "cosine_similarity": _cosine_similarity,
    "einsum": _einsum,
    "conv3d": _conv3d,
    "adaptive_avg_pool3d": _adaptive_avg_pool3d,
    "upsample_nearest1d": _upsample1d("upsample_nearest2d"),
    "_upsample_nearest_exact1d": _upsample1d("_upsample_nearest_exact2d"),
    "upsample_linear1d": _upsample1d("upsample_bilinear2d"),
    "im2col": _im2col,
    "pad": _constant_pad,
    "constant_pad_nd": _constant_pad,
}
"""Composites by the name of PyTorch's operator, for calls that no operator matches by name."""

_UPSAMPLE3D: Mapping[str, Composite] = {
    "upsample_nearest3d": _upsample3d("upsample_nearest2d"),
    "_upsample_nearest_exact3d": _upsample3d("_upsample_nearest_exact2d"),
    "upsample_trilinear3d": _upsample3d("upsample_bilinear2d"),
}

VOLUME_COMPOSITES: Mapping[bool, Mapping[str, Composite]] = {
    nhwc: {
        "avg_pool3d": _pool3d("avg_pool2d", nhwc),
        "max_pool3d": _pool3d("max_pool2d", nhwc),
        "max_pool3d_with_indices": _pool3d("max_pool2d", nhwc),
        **(_UPSAMPLE3D if nhwc else {}),
    }
    for nhwc in (False, True)
}
"""Composites of functions of volumes, for those in NDHWC (True) and in NCDHW."""

FOLDED_COMPOSITES: Mapping[str, Composite] = {
    "conv3d": _conv3d,
    "einsum": _layer(_Contraction.of_einsum),
    "matmul": _layer(_of_matmul),
    "tensordot": _layer(_of_tensordot),
}
"""Composites of operators whose weights may be constants only after folding."""
