"""Neighbouring pointwise nodes made one: what lies between them is never written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.pointwise import Pointwise, broadcast
from escalade.ops.expressions import Expression

FREE_CALLS = 2
"""Functions that are computed again, for several readers, rather than stored once."""
BROADCAST_CALLS = 3
"""Functions of a smaller value that are computed again for each element that it is broadcast to: about what an H200
does while memory brings the element."""
Condition = Callable[[Graph, Node, Node], bool]


def read_unrepeated(graph: Graph) -> None:
    """Has pointwise nodes read what the model repeats for them, `x * gate.expand_as(x)`, as it was before: they
    broadcast it themselves."""
    for node in graph:
        if (expression := operator_of(node).expression(node)) is None:
            continue
        values = dict(node.inputs)
        for role in values:
            while (narrow := _unrepeated(graph, values[role])) is not None:
                made = Pointwise.joined(node, expression, {**values, role: narrow}, graph)
                if not isinstance(made, Node):
                    break
                values[role] = narrow
                graph.nodes[node.name] = made


def _unrepeated(graph: Graph, name: str) -> str | None:
    """The value that another is with some sizes of one made larger; None if it is none."""
    node = graph.nodes.get(name)
    role = None if node is None else operator_of(node).repeated(node)
    if node is None or role is None:
        return None
    given = node.inputs[role]
    before = graph.shape_of(given)
    behind = node.shape[len(node.shape) - len(before) :]
    alike = all(size in (1, larger) for size, larger in zip(before, behind, strict=True))
    return given if alike else None


def join_recognised(graph: Graph) -> None:
    """Joins what the model writes in several calls, `x * sigmoid(x)`, so that whatever stands in front sees one node
    behind it. Values that others are broadcast from stay: the layer in front of them may compute them."""
    _number_constants(graph)
    _join(graph, _is_recognised)


def join_neighbours(graph: Graph) -> None:
    """Joins whatever is pointwise and left, also where a little is computed twice for it."""
    _number_constants(graph)
    _join(graph, _is_worth_it)


def _is_recognised(graph: Graph, producer: Node, consumer: Node) -> bool:
    if not (Pointwise.matches(producer) and Pointwise.matches(consumer)):
        return False
    if not producer.is_floating:
        return all(Pointwise.matches(reader) for reader in graph.readers(producer.name))
    return producer.shape == consumer.shape and graph.readers(producer.name) == [consumer]


def _is_worth_it(graph: Graph, producer: Node, consumer: Node) -> bool:
    calls = len(_expression(producer).calls)
    if producer.shape != consumer.shape and calls > BROADCAST_CALLS:
        return False
    readers = graph.readers(producer.name)
    if readers == [consumer]:  # which may read it twice: the expression has one input for both
        return True
    values = [name for name in producer.inputs.values() if name not in graph.constants]
    return (
        calls <= FREE_CALLS
        and (len(values) <= 1 or not producer.is_floating)
        and all(operator_of(reader).expression(reader) is not None for reader in readers)
    )


def _expression(node: Node) -> Expression:
    expression = operator_of(node).expression(node)
    assert expression is not None
    return expression


def _join(graph: Graph, holds: Condition) -> None:
    for node in graph:
        consumer: Node | None = node
        while consumer is not None and operator_of(consumer).expression(consumer) is not None:
            consumer = _joined_once(graph, consumer, holds)


def _joined_once(graph: Graph, consumer: Node, holds: Condition) -> Node | None:
    """The consumer with one of the pointwise nodes in front of it, if there is one to join with."""
    for name in dict.fromkeys(consumer.inputs.values()):
        producer = graph.nodes.get(name)
        if producer is None or name in graph.outputs or operator_of(producer).expression(producer) is None:
            continue
        if not holds(graph, producer, consumer):
            continue
        whole = _put_together(graph, producer, consumer)
        if whole is not None:
            graph.nodes[consumer.name] = whole
            if not graph.readers(name):
                del graph.nodes[name]
            return whole
    return None


def _put_together(graph: Graph, producer: Node, consumer: Node) -> Node | None:
    """A node that computes what both do, of values by their names; None if that is too much for one."""
    by_value = _expression(producer).rename(producer.inputs)
    outer = _expression(consumer).rename(consumer.inputs)
    whole = outer.substitute({producer.name: by_value})
    sources = dict.fromkeys(source for source in (producer.source, consumer.source) if source)
    made = Pointwise.joined(consumer, whole, {name: name for name in whole.inputs}, graph)
    return replace(made, source=", ".join(sources)) if isinstance(made, Node) else None


def _number_constants(graph: Graph) -> None:
    """Constants of one number, in one element or in all, become numbers of the expressions that read them."""
    for node in graph:
        if not Pointwise.matches(node):
            continue
        numbers = {
            role: Expression((), (float(graph.constants[name].flatten()[0]),))
            for role, name in node.inputs.items()
            if name in graph.constants and _is_one_number(graph.constants[name])
        }
        rest = {role: name for role, name in node.inputs.items() if role not in numbers}
        if not numbers or not rest or broadcast(map(graph.shape_of, rest.values())) != node.shape:
            continue
        made = Pointwise.joined(node, _expression(node).substitute(numbers), rest, graph)
        if isinstance(made, Node):
            graph.nodes[node.name] = made


def _is_one_number(constant: torch.Tensor) -> bool:
    return constant.numel() > 0 and bool((constant == constant.flatten()[0]).all())
