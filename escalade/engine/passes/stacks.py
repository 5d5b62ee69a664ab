"""Reductions over a stacked dimension, replaced by pointwise functions of the items; the stack is never written.

Weighted branches of a network are often written this way: `(stack(a, b) * softmax(w)).sum(1)`.
"""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node, Reference, Shape, dtype_name
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.aten import Aten
from escalade.engine.nodes.base import AtenCall, name_of
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.reduce import Reduce
from escalade.engine.nodes.views import Reshape, Slice

_COMBINE = {"sum": "x + a", "mean": "x + a", "amax": "maximum(x, a)", "amin": "minimum(x, a)"}
"""Expression that combines two items, by kind of the reduction."""
_MAX_ITEMS = 8  # items per stack that fit one expression


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
    stacked = _stacked(node)
    if stacked is not None:
        items, dimension = stacked
        same_dtype = {dtype_name(graph.dtype_of(item)) for item in items} == {node.dtype}
        return len(items) if same_dtype and dimension == dim and 1 < len(items) <= _MAX_ITEMS else 0
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


def _stacked(node: Node) -> tuple[list[str], int] | None:
    if not Aten.matches(node) or name_of(node.attributes["target"]) != "stack":
        return None
    call = AtenCall(node)
    items, dim = call("tensors", ()), call("dim", 0)
    if not isinstance(dim, int) or not all(isinstance(item, Reference) for item in items):
        return None
    return [node.inputs[item.role] for item in items], dim % len(node.shape)


def _item(graph: Graph, before: Node, name: str, dim: int, index: int) -> str:
    """Return an item of a value along `dim`, adding nodes before `before` if needed."""
    node = graph.nodes.get(name)
    stacked = None if node is None else _stacked(node)
    if stacked is not None and stacked[1] == dim:
        return stacked[0][index]
    shape = graph.shape_of(name)
    if node is not None and _item_count(graph, name, dim):
        inputs = {role: _item(graph, before, value, dim, index) for role, value in node.inputs.items()}
        item = replace(node, name=graph.fresh(f"{name}_{index}"), inputs=inputs, shape=_drop_dim(shape, dim))
        graph.insert_before(before.name, item)
        return item.name
    dtype = dtype_name(graph.dtype_of(name))
    if shape[dim] != 1:
        own = (*shape[:dim], 1, *shape[dim + 1 :])
        part = Slice.node(
            graph.fresh(f"{name}_{index}"), {"x": name}, {"dimension": dim, "first": index}, own, dtype
        )
        graph.insert_before(before.name, part)
        name = part.name
    squeezed = Reshape.node(graph.fresh(f"{name}_item"), {"x": name}, {}, _drop_dim(shape, dim), dtype)
    graph.insert_before(before.name, squeezed)
    return squeezed.name


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
