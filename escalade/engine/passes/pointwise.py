"""Fusion of neighboring pointwise nodes, so that intermediate values are never written."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from escalade.engine.graph.graph import Graph, Node, Reference, joint_source
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.pointwise import MAX_CALLS, ROLES, Pointwise, broadcast
from escalade.engine.nodes.side_outputs import SideOutput, replace_producer, side_buffer_of, side_outputs_of
from escalade.engine.nodes.views import Concatenate, Slice
from escalade.engine.passes.gradient_patterns import depends_on, sort_nodes
from escalade.ops.expressions import Expression
from escalade.ops.pointwise import MOST_RESULTS
from escalade.ops.shared.pointwise import result_names

# Function calls that are cheaper to recompute for several readers than to store and load.
MAX_RECOMPUTED_CALLS = 2
# Function calls on a smaller value that are recomputed for each element it is broadcast to: about what an H200 computes
# while the element is loaded from memory.
MAX_BROADCAST_CALLS = 3
_EXPANDING = frozenset(
    "expand expand_as broadcast_to repeat tile repeat_interleave broadcast_tensors".split()
)
"""Operators that repeat a tensor along dimensions of size 1, or otherwise repeat its contents."""
Condition = Callable[[Graph, Node, Node], bool]


def read_unexpanded(graph: Graph) -> None:
    """Remove explicit expansion of operands, as in `x * gate.expand_as(x)`: pointwise nodes broadcast by themselves."""
    for node in graph:
        if (expression := operator_of(node).expression(node)) is None:
            continue
        values = dict(node.inputs)
        for role in values:
            while (unexpanded := _unexpanded(graph, values[role])) is not None:
                fused = Pointwise.joined(node, expression, {**values, role: unexpanded}, graph)
                if not isinstance(fused, Node):
                    break
                values[role] = unexpanded
                graph.nodes[node.name] = fused


def _unexpanded(graph: Graph, name: str) -> str | None:
    """Return the value of which `name` is an expansion along dimensions of size 1; None if it is not one."""
    node = graph.nodes.get(name)
    if node is None or node.calls not in _EXPANDING:
        return None
    arguments = node.attributes["arguments"]
    is_one_of_several = "result" in node.attributes
    operand = arguments["tensors"][node.attributes["result"]] if is_one_of_several else arguments.get("self")
    if not isinstance(operand, Reference):
        return None
    source = node.inputs[operand.role]
    before = graph.shape_of(source)
    expanded = node.shape[len(node.shape) - len(before) :]
    is_expansion = all(size in (1, larger) for size, larger in zip(before, expanded, strict=True))
    return source if is_expansion else None


def read_parts(graph: Graph) -> None:
    """Let pointwise kernels, which read with any pitch, compute what adds or clamps parts of other values.

    Those of a sum or a ReLU take dense values, and the parts would be copied for them.
    """
    for node in graph:
        expression = operator_of(node).expression(node)
        if (
            expression is None
            or Pointwise.matches(node)
            or not any(_is_part(graph, name) for name in node.inputs.values())
        ):
            continue
        joined = Pointwise.joined(node, expression, node.inputs, graph)
        if isinstance(joined, Node):
            # Layouts are assigned by now: readers expect the result in that of the node.
            layout = {"layout": node.attributes["layout"]} if "layout" in node.attributes else {}
            graph.nodes[node.name] = joined.with_attributes(**layout)


def _is_part(graph: Graph, name: str) -> bool:
    """Return True for a slice, or a value that is concatenated with others."""
    return Slice.matches(graph.nodes.get(name)) or any(map(Concatenate.matches, graph.readers(name)))


def fuse_recognized(graph: Graph) -> None:
    """Fuse what the model writes in several calls, such as `x * sigmoid(x)`, for epilogue fusion to see one node.

    Values that are broadcast stay separate: the layer that produces their operand may compute them.
    """
    _inline_scalar_constants(graph)
    _fuse(graph, _is_recognized)


def fuse_neighbors(graph: Graph) -> None:
    """Fuse the remaining pointwise nodes, even if a few functions are computed twice."""
    _inline_scalar_constants(graph)
    _fuse(graph, _is_worthwhile)


def fuse_siblings(graph: Graph) -> None:
    """Compute functions of the same values in one kernel, such as the gradients of both factors of a product.

    A function joins an earlier one if it is the last reader of a value of its own size: its result takes the place of
    that value, and no more memory is used.
    """
    places = {node.name: place for place, node in enumerate(graph)}
    for name in [node.name for node in graph if Pointwise.matches(node)]:
        node = graph.nodes[name]
        sibling = _sibling(node, graph, places)
        if sibling is not None:
            fused, buffer = with_result(sibling, node)
            replace_producer(graph, fused)
            graph.nodes[name] = SideOutput.of(fused, name, buffer, node.shape, node.dtype)
            sort_nodes(graph)
            places = {node.name: place for place, node in enumerate(graph)}


def _sibling(node: Node, graph: Graph, places: Mapping[str, int]) -> Node | None:
    """Return an earlier pointwise node that reads a value for which `node` is the last reader."""
    if not node.is_floating or side_outputs_of(node, graph):
        return None
    for value in dict.fromkeys(node.inputs.values()):
        if value not in graph.nodes or value in graph.outputs or graph.shape_of(value) != node.shape:
            continue
        readers = [one for one in graph.readers(value) if side_buffer_of(one) is None]
        *others, last = sorted(readers, key=lambda one: places[one.name])
        if last.name != node.name:
            continue
        for other in reversed(others):
            if not Pointwise.matches(other) or not has_room(other, node):
                continue
            if not depends_on(node.name, [other.name], graph, places):
                return other
    return None


def has_room(host: Node, node: Node) -> bool:
    """Return True if the kernel of a pointwise node can also compute another function of the same shape and dtype."""
    if not host.is_floating or (host.shape, host.dtype) != (node.shape, node.dtype):
        return False
    own, other = _expression(host), _expression(node)
    return (
        len({*host.inputs.values(), *node.inputs.values()}) <= len(ROLES)
        and len(own.results) < MOST_RESULTS
        and len(own.calls) + len(other.calls) <= MAX_CALLS
    )


def with_result(host: Node, node: Node) -> tuple[Node, str]:
    """Return a pointwise node that also computes the function of another one, and the buffer for that."""
    roles = {name: role for role, name in host.inputs.items()}
    free = [role for role in ROLES if role not in host.inputs]
    for name in node.inputs.values():
        if name not in roles:
            roles[name] = free.pop(0)
    own = _expression(node).rename({role: roles[name] for role, name in node.inputs.items()})
    both = _expression(host).concat(own)
    inputs = {role: name for name, role in roles.items()}
    return replace(host, inputs=inputs).with_attributes(expression=both.text), result_names(both)[-1]


def _is_recognized(graph: Graph, producer: Node, consumer: Node) -> bool:
    if not (Pointwise.matches(producer) and Pointwise.matches(consumer)):
        return False
    if not producer.is_floating:
        return all(Pointwise.matches(reader) for reader in graph.readers(producer.name))
    return producer.shape == consumer.shape and graph.readers(producer.name) == [consumer]


def _is_worthwhile(graph: Graph, producer: Node, consumer: Node) -> bool:
    calls = len(_expression(producer).calls)
    if producer.shape != consumer.shape and calls > MAX_BROADCAST_CALLS:
        return False
    readers = graph.readers(producer.name)
    if readers == [consumer]:  # even if it reads the value twice: one input of the expression covers both
        return True
    values = [name for name in producer.inputs.values() if name not in graph.constants]
    return (
        calls <= MAX_RECOMPUTED_CALLS
        and (len(values) <= 1 or not producer.is_floating)
        and all(operator_of(reader).expression(reader) is not None for reader in readers)
    )


def _expression(node: Node) -> Expression:
    expression = operator_of(node).expression(node)
    assert expression is not None
    return expression


def _fuse(graph: Graph, condition: Condition) -> None:
    for node in graph:
        consumer: Node | None = node
        while consumer is not None and operator_of(consumer).expression(consumer) is not None:
            consumer = _fuse_one(graph, consumer, condition)


def _fuse_one(graph: Graph, consumer: Node, condition: Condition) -> Node | None:
    """Fuse the consumer with one of its pointwise operands; None if there is nothing to fuse."""
    for name in dict.fromkeys(consumer.inputs.values()):
        producer = graph.nodes.get(name)
        if producer is None or name in graph.outputs or operator_of(producer).expression(producer) is None:
            continue
        if not condition(graph, producer, consumer):
            continue
        whole = _fused(graph, producer, consumer)
        if whole is not None:
            graph.nodes[consumer.name] = whole
            if not graph.readers(name):
                del graph.nodes[name]
            return whole
    return None


def _fused(graph: Graph, producer: Node, consumer: Node) -> Node | None:
    """Return one node for both; None if it would exceed the limits of a pointwise node."""
    by_value = _expression(producer).rename(producer.inputs)
    outer = _expression(consumer).rename(consumer.inputs)
    whole = outer.substitute({producer.name: by_value})
    fused = Pointwise.joined(consumer, whole, {name: name for name in whole.inputs}, graph)
    return replace(fused, source=joint_source(producer, consumer)) if isinstance(fused, Node) else None


def _inline_scalar_constants(graph: Graph) -> None:
    """Inline constants with a single distinct value as numbers in the expressions that read them."""
    for node in graph:
        if not Pointwise.matches(node):
            continue
        numbers = {
            role: Expression((), (float(graph.constants[name].flatten()[0]),))
            for role, name in node.inputs.items()
            if name in graph.constants and _is_uniform(graph.constants[name])
        }
        rest = {role: name for role, name in node.inputs.items() if role not in numbers}
        if not numbers or not rest or broadcast(map(graph.shape_of, rest.values())) != node.shape:
            continue
        fused = Pointwise.joined(node, _expression(node).substitute(numbers), rest, graph)
        if isinstance(fused, Node):
            graph.nodes[node.name] = fused


def _is_uniform(constant: torch.Tensor) -> bool:
    return constant.numel() > 0 and bool((constant == constant.flatten()[0]).all())
