"""What is stacked and then reduced over the new dimension: functions of the items themselves, and nothing is stacked.

Branches of a network that are weighted by each other, `(stack(a, b) * softmax(w)).sum(1)`, are written so.
"""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node, Reference, Shape
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.aten import Aten
from escalade.engine.nodes.aten_call import AtenCall, name_of
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.reduce import Reduce
from escalade.engine.nodes.reshape import Reshape
from escalade.engine.nodes.slice import Slice

_TOGETHER = {"sum": "x + a", "mean": "x + a", "amax": "maximum(x, a)", "amin": "minimum(x, a)"}
"""Two items of what is reduced, by the kind of the reduction."""
_MOST = 8
"""Items of a stack: what one expression is made of."""


def resolve_stacks(graph: Graph) -> None:
    """Sums, means and extremes over what is stacked become those of the items."""
    for node in graph:
        if not Reduce.matches(node) or len(node.attributes["dims"]) != 1 or "before" in node.attributes:
            continue
        kind, (at,) = node.attributes["kind"], node.attributes["dims"]
        if kind in _TOGETHER and (count := _count(graph, node.inputs["x"], at)):
            items = [_item(graph, node, node.inputs["x"], at, number) for number in range(count)]
            _combine(graph, node, kind, items)
    graph.remove_dead_code()


def _count(graph: Graph, name: str, at: int) -> int:
    """How many items a value is stacked of along a dimension, itself or what it is a function of; 0: it is not."""
    node = graph.nodes.get(name)
    if node is None or not node.is_floating:
        return 0
    stacked = _stacked(node)
    if stacked is not None:
        items, dimension = stacked
        alike = {str(graph.dtype_of(item)).removeprefix("torch.") for item in items} == {node.dtype}
        return len(items) if alike and dimension == at and 1 < len(items) <= _MOST else 0
    if operator_of(node).expression(node) is None or name in graph.constants:
        return 0
    counts = []
    for value in node.inputs.values():
        shape = graph.shape_of(value)
        if len(shape) != len(node.shape) or value in graph.constants:
            return 0
        counts.append(_count(graph, value, at))
    found = max(counts, default=0)
    return found if node.shape[at] == found else 0


def _stacked(node: Node) -> tuple[list[str], int] | None:
    """What a node stacks, and along which dimension."""
    if not Aten.matches(node) or name_of(node.attributes["target"]) != "stack":
        return None
    call = AtenCall(node)
    items, at = call("tensors", ()), call("dim", 0)
    if not isinstance(at, int) or not all(isinstance(one, Reference) for one in items):
        return None
    return [node.inputs[one.role] for one in items], at % len(node.shape)


def _item(graph: Graph, place: Node, name: str, at: int, number: int) -> str:
    """An item of a value along a dimension, made in front of `place`."""
    node = graph.nodes.get(name)
    stacked = None if node is None else _stacked(node)
    if stacked is not None and stacked[1] == at:
        return stacked[0][number]
    shape = graph.shape_of(name)
    if node is not None and _count(graph, name, at):
        inputs = {role: _item(graph, place, value, at, number) for role, value in node.inputs.items()}
        made = replace(node, name=graph.fresh(f"{name}_{number}"), inputs=inputs, shape=_without(shape, at))
        graph.insert_before(place.name, made)
        return made.name
    dtype = str(graph.dtype_of(name)).removeprefix("torch.")
    if shape[at] != 1:
        own = (*shape[:at], 1, *shape[at + 1 :])
        part = Slice.node(
            graph.fresh(f"{name}_{number}"), {"x": name}, {"dimension": at, "first": number}, own, dtype
        )
        graph.insert_before(place.name, part)
        name = part.name
    seen = Reshape.node(graph.fresh(f"{name}_item"), {"x": name}, {}, _without(shape, at), dtype)
    graph.insert_before(place.name, seen)
    return seen.name


def _without(shape: Shape, at: int) -> Shape:
    return (*shape[:at], *shape[at + 1 :])


def _combine(graph: Graph, node: Node, kind: str, items: list[str]) -> None:
    """The reduction of the items, in the place of the node."""
    shape = _without(graph.shape_of(node.inputs["x"]), node.attributes["dims"][0])

    def made(expression: str, **inputs: str) -> str:
        name = graph.fresh(f"{node.name}_of_items")
        each = Pointwise.node(name, inputs, {"expression": expression}, shape, node.dtype)
        graph.insert_before(node.name, each)
        return name

    found, *others = items
    for other in others:
        found = made(_TOGETHER[kind], x=found, a=other)
    if kind == "mean":
        found = made(f"x / {len(items)}", x=found)
    if node.attributes["keepdim"] or node.name in graph.outputs:
        graph.nodes[node.name] = Reshape.instead_of(node, {"x": found})
    else:
        graph.remove(node, instead=found)
