"""Training steps: permutations moved behind the nodes that read them, until they cancel or only views are left.

A model that attends to sequences permutes its values for every product: from [batch, tokens, features] to [tokens,
batch, features] and to heads, and back. A matrix product computes its rows in any order, and the gradient of its weight
sums over rows in any order. So the product of permuted rows is a permutation of the product, which meets the
permutation back. What remains are views, which attention reads in place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch

from escalade.engine.graph.aten import resolve_operator, takes_any_layout, takes_rows
from escalade.engine.graph.graph import Graph, Node, Reference, Shape
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.base import AtenCall, is_view_of
from escalade.engine.nodes.conv2d import Conv2d, Conv2dInputGradient, Conv2dWeightGradient
from escalade.engine.nodes.reduce import Reduce
from escalade.engine.nodes.side_outputs import side_outputs_of
from escalade.engine.nodes.views import Concatenate, Permute, Reshape, Slice
from escalade.engine.passes.layout import natural_layouts
from escalade.engine.passes.stacks import permuted, view

Order = tuple[int, ...]
_MATRIX_RANK, _IMAGE_RANK = 2, 4


def sink_step_permutes(graph: Graph) -> None:
    """Move permutations behind views, and products and pointwise functions, where fewer bytes are copied then."""
    if not any(Permute.matches(node) and len(node.shape) > _MATRIX_RANK for node in graph):
        return
    candidates = [graph, _sunk(graph, _sink_views), _sunk(graph, _sink)]
    graph.nodes = min(candidates, key=_copied_bytes).nodes


def _sunk(graph: Graph, sink: Callable[[Graph, Node], None]) -> Graph:
    """Return the graph after a function was applied to its nodes, except to outputs and to views of images."""
    moved = graph.copy()
    views = _views_of_images(graph)
    for node in moved:
        reads_image = any(_source(moved, name) in views for name in node.inputs.values())
        if node.name not in moved.outputs and node.name not in views and not reads_image:
            sink(moved, node)
    moved.remove_dead_code()
    _merge_views(moved)
    return moved


def _merge_views(graph: Graph) -> None:
    """Merge equal views, so that a copy of one serves all its readers."""
    first: dict[tuple[object, ...], str] = {}
    for node in graph:
        if (Permute.matches(node) or Reshape.matches(node)) and node.name not in graph.outputs:
            key = Permute.matches(node), node.inputs["x"], node.shape, node.attributes.get("order")
            if (same := first.setdefault(key, node.name)) != node.name:
                graph.remove(node, instead=same)


def _views_of_images(graph: Graph) -> set[str]:
    """Return permutations of images that are stored in NHWC, such as those to rows of channels."""
    layouts = natural_layouts(graph)
    found = set()
    for node in graph:
        source = _source(graph, node.inputs["x"]) if Permute.matches(node) else ""
        if layouts.get(source) == "nhwc" and graph.shape_of(source)[2:] != (1, 1):
            found.add(node.name)
    return found


def _sink_views(graph: Graph, node: Node) -> None:
    """Move a permutation behind a view or a concatenation of it."""
    if Permute.matches(node):
        value = permuted(graph, node, node.inputs["x"], node.attributes["order"])
        if graph.nodes.get(value) != replace(node, name=value):
            graph.remove(node, instead=value)
        else:
            graph.remove(graph.nodes[value], instead=node.name)
    elif Reshape.matches(node):
        _sink_into_reshape(graph, node)
    elif Slice.matches(node) or node.calls in ("select", "unbind"):
        _sink_into_range(graph, node)
    elif Concatenate.matches(node):
        _sink_into_elements(graph, node)


def _sink(graph: Graph, node: Node) -> None:
    """Move a permutation behind a view of it, a pointwise function, a reduction or a product."""
    if operator_of(node).expression(node) is not None:
        _sink_into_elements(graph, node)
    elif Reduce.matches(node):
        _sink_into_reduction(graph, node)
    elif Conv2d.matches(node) or Conv2dInputGradient.matches(node):
        _sink_into_product(graph, node)
    elif Conv2dWeightGradient.matches(node):
        _drop_in_weight_gradient(graph, node)
    else:
        _sink_views(graph, node)


def _replace(graph: Graph, node: Node, value: str, order: Order) -> None:
    """Replace a node by the permutation of a value."""
    graph.remove(node, instead=permuted(graph, node, value, order))


def _permutation(graph: Graph, name: str) -> tuple[str, Order] | None:
    """Return the value and the order that a permutation has; None for any other value."""
    node = graph.nodes.get(name)
    return (node.inputs["x"], node.attributes["order"]) if Permute.matches(node) else None


def _source(graph: Graph, name: str) -> str:
    """Return the value that another one is a reshape of, through any number of them."""
    while Reshape.matches(node := graph.nodes.get(name)) and "order" not in node.attributes:
        name = node.inputs["x"]
    return name


def _sink_into_reshape(graph: Graph, node: Node) -> None:
    """Replace reshape(permute(x)) by permute(reshape(x)), or by permute(reshape(permute(x))).

    The latter puts all dimensions but the last in the order of x.
    """
    source = _source(graph, node.name)
    found = _permutation(graph, source)
    if found is None:
        return
    x, order = found
    places = _places(graph.shape_of(source), node.shape, order)
    if places is None:
        return
    sizes, groups = places
    are_whole = all(group == list(range(group[0], group[0] + len(group))) for group in groups if group)
    large = [dim for dim, group in enumerate(groups) if group]
    fixed = [] if are_whole else large[-1:]
    inner = _sorted_dims(groups, fixed)
    if not are_whole and inner == list(range(len(groups))):
        if node.inputs["x"] != source:
            graph.nodes[node.name] = node.with_inputs(x=source)
        return
    value = view(graph, node, x, sizes)
    value = permuted(graph, node, value, tuple(place for dim in inner for place in groups[dim]))
    value = view(graph, node, value, tuple(node.shape[dim] for dim in inner))
    _replace(graph, node, value, tuple(map(inner.index, range(len(inner)))))


def _sorted_dims(groups: Sequence[Sequence[int]], last: Sequence[int]) -> list[int]:
    """Return dimensions by their first place, but those in `last` behind the others.

    Dimensions of one element have no place and stay behind the one in front of them.
    """
    keys: list[tuple[bool, int]] = []
    for dim, group in enumerate(groups):
        before = keys[-1] if keys else (False, -1)
        keys.append((dim in last, group[0]) if group else before)
    return sorted(range(len(groups)), key=keys.__getitem__)


def _places(shape: Shape, result: Shape, order: Order) -> tuple[Shape, list[list[int]]] | None:
    """Return x, of which `shape` is a permutation, in a shape that splits its dimensions as far as `result` does.

    Also return the places in it of each of the result's dimensions. None if there is no such shape.
    """
    bounds = sorted({*_bounds(shape), *_bounds(result)})
    if any(after % before for before, after in pairwise(bounds)):
        return None
    parts = [after // before for before, after in pairwise(bounds)][::-1]
    """Sizes of the smallest dimensions that both are made of, outermost first."""
    split, merged = _grouped(shape, parts), _grouped(result, parts)
    in_x = [part for dim in sorted(range(len(order)), key=order.__getitem__) for part in split[dim]]
    place = {part: index for index, part in enumerate(in_x)}
    return tuple(parts[part] for part in in_x), [[place[part] for part in group] for group in merged]


def _bounds(shape: Shape) -> list[int]:
    """Return the elements within each dimension, from the innermost to the whole."""
    sizes = [1]
    for size in reversed(shape):
        sizes.append(sizes[-1] * size)  # type: ignore[operator]
    return sizes


def _grouped(shape: Shape, parts: Sequence[int]) -> list[list[int]]:
    """Return the indices of the parts that each dimension consists of."""
    groups, index = [], 0
    for size in shape:
        group, elements = [], 1
        while elements != size:
            elements *= parts[index]
            group.append(index)
            index += 1
        groups.append(group)
    return groups


def _sink_into_elements(graph: Graph, node: Node) -> None:
    """Move one permutation of all operands behind a concatenation, or a function of single elements.

    Only permutations of rows can cancel behind products.
    """
    orders, inputs = set(), {}
    for role, name in node.inputs.items():
        found = _permutation(graph, name)
        if found is not None and len(found[1]) == len(node.shape):
            inputs[role], order = found
            orders.add(order)
        else:
            inputs[role] = name
    if len(orders) != 1 or side_outputs_of(node, graph):
        return
    (order,) = orders
    if order[-1] != len(order) - 1:
        return
    for role, name in inputs.items():
        if name == node.inputs[role] and not _is_row(graph.shape_of(name), order, node):
            return
    attributes = dict(node.attributes)
    if Concatenate.matches(node):
        attributes["dimension"] = order[attributes["dimension"]]
    back = _inverse(order)
    shape = tuple(node.shape[dim] for dim in back)
    moved = replace(node, name=f"{node.name}_unpermuted", inputs=inputs, attributes=attributes, shape=shape)
    _replace(graph, node, graph.add(moved, before=node.name), order)


def _is_row(shape: Shape, order: Order, node: Node) -> bool:
    """Return True for an operand that is broadcast along all dimensions that a permutation moves."""
    first = len(order) - len(shape)
    is_fixed = all(size == 1 or order[dim] == dim for dim, size in enumerate(shape, first))
    return is_fixed and not Concatenate.matches(node) and len(shape) < len(order)


def _inverse(order: Order) -> Order:
    return tuple(map(order.index, range(len(order))))


def _sink_into_range(graph: Graph, node: Node) -> None:
    """Move a permutation behind a slice, or behind the selection of one item along a dimension."""
    (name,) = node.inputs.values()
    found = _permutation(graph, name)
    if found is None:
        return
    (x, order), (role,) = found, node.inputs
    if Slice.matches(node):
        shape = tuple(node.shape[dim] for dim in _inverse(order))
        moved = node.with_inputs(x=x).with_attributes(dimension=order[node.attributes["dimension"]])
        left = order
    else:
        call = AtenCall(node)
        dim = order[call("dim", 0) % len(order)]
        arguments = {
            "self": Reference(role),
            "dim": dim,
            "index": call("index", node.attributes.get("result")),
        }
        rest = [one for one in order if one != dim]
        shape = tuple(size for one, size in enumerate(graph.shape_of(x)) if one != dim)
        item = {"target": "aten::select.int", "arguments": arguments}
        moved = replace(node, inputs={role: x}, attributes=item)
        left = tuple(one - (one > dim) for one in rest)
    moved = replace(moved, name=f"{node.name}_unpermuted", shape=shape)
    _replace(graph, node, graph.add(moved, before=node.name), left)


def _sink_into_reduction(graph: Graph, node: Node) -> None:
    """Reduce rows in the order of their source, and a permuted value as it was if only reduced dimensions moved."""
    name, dims = node.inputs["x"], node.attributes["dims"]
    if len(node.inputs) > 1:
        return
    rows, found = _rows(graph, name), _permutation(graph, name)
    if rows is not None and len(graph.shape_of(name)) == _MATRIX_RANK and dims == (0,):
        graph.nodes[node.name] = node.with_inputs(x=_in_place(graph, node, name, rows))
    elif found is not None and all(dim in dims or dim == source for dim, source in enumerate(found[1])):
        graph.nodes[node.name] = node.with_inputs(x=found[0])


class _Rows(NamedTuple):
    """Rows of a matrix that are permuted: their order is that of several dimensions of x."""

    x: str
    order: Order
    leading: int
    """Dimensions that are rows; the others are the features."""
    sizes: Shape
    """Sizes of these dimensions."""
    back: Order
    """Order of the rows' dimensions, relative to that in x."""


def _rows(graph: Graph, name: str) -> _Rows | None:
    """Return the rows of a matrix, or of images of one pixel, if they are permuted."""
    source = _source(graph, name)
    found = _permutation(graph, source)
    if found is None or source == name or not _are_rows(graph, name):
        return None
    rows = graph.shape_of(name)[0]
    shape = graph.shape_of(source)
    leading = next((n for n in range(len(shape)) if math.prod(shape[:n]) == rows), 0)  # type: ignore[arg-type]
    x, order = found
    by_place = sorted(range(leading), key=order.__getitem__)
    large = [dim for dim in range(leading) if shape[dim] != 1]
    if sorted(large, key=order.__getitem__) == large:
        return None
    return _Rows(x, order, leading, shape[:leading], tuple(map(by_place.index, range(leading))))


def _are_rows(graph: Graph, name: str) -> bool:
    return graph.shape_of(name)[2:] in ((), (1, 1))


def _in_place(graph: Graph, node: Node, name: str, rows: _Rows) -> str:
    """Return a matrix, or images of one pixel, with the rows in the order of x."""
    order = (*sorted(rows.order[: rows.leading]), *rows.order[rows.leading :])
    return view(graph, node, permuted(graph, node, rows.x, order), graph.shape_of(name))


def _sink_into_product(graph: Graph, node: Node) -> None:
    """Compute a product of permuted rows in the order of their source, and permute its rows."""
    role = "x" if Conv2d.matches(node) else "gradient"
    name = node.inputs[role]
    rows = _rows(graph, name) if not {"residual", "mask", "shortcut"} & node.inputs.keys() else None
    if rows is None or node.shape[2:] != (1, 1) or node.shape[0] != graph.shape_of(name)[0]:
        return
    if side_outputs_of(node, graph):
        return
    moved = replace(node.with_inputs(**{role: _in_place(graph, node, name, rows)}), name=f"{node.name}_rows")
    product = graph.add(moved, before=node.name)
    sizes = [rows.sizes[dim] for dim in _inverse(rows.back)]
    value = view(graph, node, product, (*sizes, node.shape[1]))
    value = permuted(graph, node, value, (*rows.back, len(sizes)))
    graph.nodes[node.name] = Reshape.instead_of(node, {"x": value})


def _drop_in_weight_gradient(graph: Graph, node: Node) -> None:
    """Sum over rows in the order of their sources, if both operands are permuted alike."""
    x, gradient = node.inputs["x"], node.inputs["gradient"]
    if not all(_are_rows(graph, name) for name in (node.name, x, gradient)):
        return
    rows, other = _rows(graph, x), _rows(graph, gradient)
    if rows is None or other is None or (rows.sizes, rows.back) != (other.sizes, other.back):
        return
    graph.nodes[node.name] = node.with_inputs(
        x=_in_place(graph, node, x, rows), gradient=_in_place(graph, node, gradient, other)
    )


def _copied_bytes(graph: Graph) -> int:
    """Return the bytes of the copies that views need which are not dense where a kernel reads them."""
    layouts = natural_layouts(graph)
    tensors: dict[str, torch.Tensor] = {}
    copied = 0

    def dense(name: str) -> torch.Tensor:
        made = torch.empty(graph.shape_of(name), dtype=graph.dtype_of(name), device="meta")  # type: ignore[arg-type]
        is_nhwc = made.dim() == _IMAGE_RANK and layouts.get(name) == "nhwc"
        return made.contiguous(memory_format=torch.channels_last) if is_nhwc else made

    def read(names: Iterable[str]) -> int:
        found = 0
        for name in dict.fromkeys(names):
            tensor = tensors.setdefault(name, dense(name))
            if not _is_dense(tensor, graph.nodes.get(name)):
                found += tensor.nbytes
                tensors[name] = dense(name)
        return found

    for node in graph:
        operator = operator_of(node)
        if len(node.inputs) == 1 and operator.may_alias(node):
            ((role, name),) = node.inputs.items()
            before = tensors.setdefault(name, dense(name))
            after = operator.compute(node, {role: before})
            is_view = is_view_of(after, before)
            copied += 0 if is_view else after.nbytes
            tensors[node.name] = after if is_view else dense(node.name)
        elif not Concatenate.matches(node) and not _reads_views(node):
            copied += read(node.inputs.values())
    return copied + read(graph.outputs)


def _is_dense(tensor: torch.Tensor, node: Node | None) -> bool:
    """Return True if kernels can read a value; a permutation may be an image in NHWC, but no reshape of one is."""
    is_image = tensor.dim() == _IMAGE_RANK and not Reshape.matches(node)
    return tensor.is_contiguous() or (is_image and tensor.is_contiguous(memory_format=torch.channels_last))


def _reads_views(node: Node) -> bool:
    if not node.calls:
        return operator_of(node).reads_views
    operator = resolve_operator(node.attributes["target"])
    return takes_any_layout(operator) or takes_rows(operator)
