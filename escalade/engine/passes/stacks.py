"""Reductions over a stacked dimension, replaced by pointwise functions of the items; the stack is never written.

Weighted branches of a network are often written this way: `(stack(a, b) * softmax(w)).sum(1)`. Channels that are split
into groups, as in `x.view(batch, 2, channels, height, width).sum(1)`, are a stack of slices, which stay in NHWC.
"""

from __future__ import annotations

import math
from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node, Reference, Shape, dtype_name
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.aten import Aten
from escalade.engine.nodes.base import AtenCall, Operator, name_of
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.reduce import Reduce
from escalade.engine.nodes.views import Concatenate, Reshape, Slice, concatenated_values

_COMBINE = {"sum": "x + a", "mean": "x + a", "amax": "maximum(x, a)", "amin": "minimum(x, a)"}
"""Expression that combines two items, by kind of the reduction."""
_MAX_ITEMS = 8  # items per stack that fit one expression
_ALIGNED = 8  # channels from slice to slice that are a whole number of 16-byte accesses in every dtype


def resolve_stacks(graph: Graph) -> None:
    """Replace sums, means and extrema over a stacked dimension by functions of the items."""
    for node in graph:
        if not Reduce.matches(node) or len(node.attributes["dims"]) != 1 or "before" in node.attributes:
            continue
        kind, (dim,) = node.attributes["kind"], node.attributes["dims"]
        if kind in _COMBINE and (count := _item_count(graph, node.inputs["x"], dim)):
            items = [_item(graph, node, node.inputs["x"], dim, index) for index in range(count)]
            _combine(graph, node, kind, items)
    graph.remove_dead_code()


def _item_count(graph: Graph, name: str, dim: int) -> int:
    """Return the number of items in a stack along `dim`, or a pointwise function of one; 0 for other values."""
    node = graph.nodes.get(name)
    if node is None or not node.is_floating:
        return 0
    stacked = _stacked(graph, node)
    if stacked is not None:
        items, dimension = stacked
        same_dtype = {dtype_name(graph.dtype_of(item)) for item in items} == {node.dtype}
        return len(items) if same_dtype and dimension == dim and 1 < len(items) <= _MAX_ITEMS else 0
    if Reshape.matches(node):
        count = node.shape[dim]
        return count if isinstance(count, int) and count <= _MAX_ITEMS and _is_split(graph, node, dim) else 0
    if operator_of(node).expression(node) is None or name in graph.constants:
        return 0
    counts = []
    for value in node.inputs.values():
        shape = graph.shape_of(value)
        if len(shape) != len(node.shape) or value in graph.constants:
            return 0
        counts.append(_item_count(graph, value, dim))
    result = max(counts, default=0)
    return result if node.shape[dim] == result else 0


def _is_split(graph: Graph, node: Node, dim: int) -> bool:
    """Return True if a reshape only splits a dimension of its operand into `dim` and the next, in aligned slices."""
    if graph.shape_of(node.inputs["x"]) != _merged_shape(node.shape, dim):
        return False
    length = node.shape[dim + 1]
    return dim > 0 and isinstance(length, int) and length % _ALIGNED == 0


def _merged_shape(shape: Shape, dim: int) -> Shape | None:
    """Return the shape with `dim` and the next dimension merged; None if there is none, or one depends on the batch."""
    both = shape[dim : dim + 2]
    if len(both) < 2 or not all(isinstance(size, int) for size in both):
        return None
    return (*shape[:dim], math.prod(both), *shape[dim + 2 :])  # type: ignore[arg-type]


def _stacked(graph: Graph, node: Node) -> tuple[list[str], int] | None:
    """Return the items of a stack, or of a concatenation of values with a new dimension, and that dimension."""
    if Concatenate.matches(node):
        dim = node.attributes["dimension"]
        parts = [graph.nodes.get(name) for name in concatenated_values(node)]
        items = [
            part.inputs["x"]
            for part in parts
            if Reshape.matches(part)
            and part.shape[dim] == 1
            and graph.shape_of(part.inputs["x"]) == _drop_dim(node.shape, dim)
        ]
        return (items, dim) if len(items) == len(parts) else None
    if not Aten.matches(node) or name_of(node.attributes["target"]) != "stack":
        return None
    call = AtenCall(node)
    tensors, dim = call("tensors", ()), call("dim", 0)
    if not isinstance(dim, int) or not all(isinstance(tensor, Reference) for tensor in tensors):
        return None
    return [node.inputs[tensor.role] for tensor in tensors], dim % len(node.shape)


def _item(graph: Graph, before: Node, name: str, dim: int, index: int) -> str:
    """Return an item of a value along `dim`, adding nodes before `before` if needed."""
    node = graph.nodes.get(name)
    stacked = None if node is None else _stacked(graph, node)
    if stacked is not None and stacked[1] == dim:
        return stacked[0][index]
    shape = graph.shape_of(name)
    is_expression = node is not None and operator_of(node).expression(node) is not None
    if node is not None and is_expression and _item_count(graph, name, dim):
        inputs = {role: _item(graph, before, value, dim, index) for role, value in node.inputs.items()}
        item = replace(node, name=graph.fresh(f"{name}_{index}"), inputs=inputs, shape=_drop_dim(shape, dim))
        graph.insert_before(before.name, item)
        return item.name
    dtype = dtype_name(graph.dtype_of(name))

    def add(operator: type[Operator], value: str, shape: Shape, **attributes: int) -> str:
        made = operator.node(graph.fresh(f"{name}_{index}"), {"x": value}, attributes, shape, dtype)
        graph.insert_before(before.name, made)
        return made.name

    dropped, merged = _drop_dim(shape, dim), _merged_shape(shape, dim)
    if shape[dim] == 1:
        return add(Reshape, name, dropped)
    if merged is None or dim == 0:
        part = add(Slice, name, (*shape[:dim], 1, *shape[dim + 1 :]), dimension=dim, first=index)
        return add(Reshape, part, dropped)
    # A slice of the merged dimension is one of channels, or of rows: offset and pitch describe it.
    source = node.inputs["x"] if Reshape.matches(node) else name
    whole = source if graph.shape_of(source) == merged else add(Reshape, name, merged)
    length = dropped[dim]
    assert isinstance(length, int)
    return add(Slice, whole, dropped, dimension=dim, first=index * length)


def _drop_dim(shape: Shape, dim: int) -> Shape:
    return (*shape[:dim], *shape[dim + 1 :])


def _combine(graph: Graph, node: Node, kind: str, items: list[str]) -> None:
    """Replace a reduction node by functions of the items."""
    shape = _drop_dim(graph.shape_of(node.inputs["x"]), node.attributes["dims"][0])

    def add(expression: str, **inputs: str) -> str:
        name = graph.fresh(f"{node.name}_of_items")
        combined = Pointwise.node(name, inputs, {"expression": expression}, shape, node.dtype)
        graph.insert_before(node.name, combined)
        return name

    result, *others = items
    for other in others:
        result = add(_COMBINE[kind], x=result, a=other)
    if kind == "mean":
        result = add(f"x / {len(items)}", x=result)
    if node.attributes["keepdim"] or node.name in graph.outputs:
        graph.nodes[node.name] = Reshape.instead_of(node, {"x": result})
    else:
        graph.remove(node, instead=result)
