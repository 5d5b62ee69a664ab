"""Patterns of training graphs: casts, the backward pass of ReLU, dependencies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.pointwise import Pointwise
from escalade.ops.expressions import IDENTITY, Expression

_RELU_BACKWARD = Expression.parse("where(result <= 0, 0, gradient)")


def relu_backward_after(gradient: Node, graph: Graph) -> tuple[Node, str] | None:
    """Return the ReLU backward node that is the only reader of a gradient, and the ReLU's result."""
    node = graph.only_user(gradient.name)
    found = relu_backward_operands(node, graph)
    return (node, found[1]) if node is not None and found is not None and found[0] == gradient.name else None


def relu_backward_operands(node: Node | None, graph: Graph, alike: bool = True) -> tuple[str, str] | None:
    """Return gradient and ReLU result of a ReLU backward node, all of one shape and dtype if `alike`."""
    if not Pointwise.matches(node) or len(node.inputs) != 2:
        return None
    expression = Pointwise().expression(node)
    for gradient, result in (tuple(node.inputs), tuple(node.inputs)[::-1]):
        if expression == _RELU_BACKWARD.rename({"gradient": gradient, "result": result}):
            names = node.inputs[gradient], node.inputs[result]
            return names if not alike or are_alike((*names, node.name), graph) else None
    return None


def are_alike(values: Iterable[str], graph: Graph) -> bool:
    """Return True if values have the same shape and dtype, and none of them is a constant."""
    names = list(values)
    kinds = {(graph.dtype_of(name), graph.shape_of(name)) for name in names}
    return len(kinds) == 1 and graph.constants.keys().isdisjoint(names)


def cast_source(node: Node | None, graph: Graph) -> str | None:
    """Return the value that a node casts to another floating dtype, if it does nothing else."""
    if not Pointwise.matches(node) or not node.is_floating or len(node.inputs) != 1:
        return None
    source = node.inputs["x"]
    is_cast = graph.shape_of(source) == node.shape and graph.dtype_of(source).is_floating_point
    return source if is_cast and Pointwise().expression(node) == IDENTITY else None


def depends_on(
    value: str, others: Iterable[str], graph: Graph, places: Mapping[str, int] = MappingProxyType({})
) -> bool:
    """Return True if a value is one of `others`, or computed from one of them.

    With the nodes' `places` in topological order, what is in front of all others is not followed.
    """
    wanted, seen, pending = set(others), {value}, [value]
    first = min((places.get(name, 0) for name in wanted), default=0)
    while pending:
        name = pending.pop()
        if name in wanted:
            return True
        node = graph.nodes.get(name)
        for read in () if node is None else node.inputs.values():
            if read not in seen and places.get(read, first) >= first:
                seen.add(read)
                pending.append(read)
    return False


def sort_nodes(graph: Graph) -> None:
    """Restore topological order, after a node was given more to read, with as few changes as possible."""
    ordered: dict[str, Node] = {}
    waiting: set[str] = set()
    """Nodes whose operands are being placed: one that is an operand again depends on itself."""
    pending = list(reversed(graph.nodes.values()))
    while pending:
        node = pending.pop()
        if node.name in ordered:
            continue
        missing = [
            graph.nodes[name] for name in node.inputs.values() if name in graph.nodes and name not in ordered
        ]
        if missing:
            waiting.add(node.name)
            assert waiting.isdisjoint(one.name for one in missing), f"{node.name} depends on itself"
            pending += [node, *reversed(missing)]
        else:
            waiting.discard(node.name)
            ordered[node.name] = node
    graph.arrange(ordered.values())
