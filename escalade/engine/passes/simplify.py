"""Simplification: constant folding, common subexpression elimination, values without elements, and counters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from escalade.engine.graph.aten import OperatorError
from escalade.engine.graph.graph import Graph, Node, map_leaves
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.aten import is_random, unread_inputs
from escalade.engine.nodes.base import AtenCall
from escalade.engine.nodes.evaluate import compute

MAX_GROWTH = 16  # elements of a folded constant per element of its origins; beyond, recomputing is cheaper
ALWAYS_FOLDED_ELEMENTS = 2**22  # up to this size, constants are folded whatever their growth


def fold_constants(graph: Graph) -> None:
    """Compute every node that depends only on constants."""
    origins_of = {
        name: frozenset((name,)) for name in graph.constants
    }  # the model's constants each is made of
    sizes = {name: tensor.numel() for name, tensor in graph.constants.items()}
    for node in graph:
        if is_random(node) or node.depends_on_batch:
            continue
        unread = unread_inputs(node)
        read = [name for role, name in node.inputs.items() if role not in unread]
        if any(name not in graph.constants for name in read):
            continue
        origins = frozenset[str]().union(*(origins_of[name] for name in read))
        max_elements = max(MAX_GROWTH * sum(sizes[name] for name in origins), ALWAYS_FOLDED_ELEMENTS)
        if (origins or unread) and math.prod(node.shape) > max_elements:  # type: ignore[arg-type]
            continue
        graph.constants[node.name] = _fold(graph, node)
        origins_of[node.name] = origins
        del graph.nodes[node.name]


def _fold(graph: Graph, node: Node) -> torch.Tensor:
    """Compute a node in float64 and round once, so that each element is as accurate as its dtype allows."""
    inputs = {role: _constant_or_zeros(graph, name) for role, name in node.inputs.items()}
    if node.is_floating:
        wide = {role: x.double() if x.is_floating_point() else x for role, x in inputs.items()}
        try:
            result = compute(node, wide, graph.device)
        except OperatorError:  # the operator rejects float64
            result = None
        if result is not None and result.is_floating_point() and tuple(result.shape) == node.shape:
            return result.to(getattr(torch, node.dtype)).contiguous()
    return compute(node, inputs, graph.device).contiguous()


def _constant_or_zeros(graph: Graph, name: str) -> torch.Tensor:
    """Return a constant; for an input that the operator does not read, zeros of its dtype, and its shape if static."""
    if name in graph.constants:
        return graph.constants[name].to(graph.device)  # a model may hold tensors on another device
    sizes = [size for size in graph.shape_of(name) if isinstance(size, int)]
    is_static = len(sizes) == len(graph.shape_of(name))
    return torch.zeros((), dtype=graph.dtype_of(name), device=graph.device).expand(sizes if is_static else ())


def drop_empty(graph: Graph) -> None:
    """Replace empty values by constants in a graph with fixed sizes, and remove nodes that only they used."""
    empty = [node for node in graph if 0 in node.shape]
    if not empty:
        return
    home = graph.device
    for node in empty:
        del graph.nodes[node.name]
        dtype = getattr(torch, node.dtype)
        graph.constants[node.name] = torch.empty(node.shape, dtype=dtype, device=home)  # type: ignore[arg-type]
    graph.remove_dead_code()


def eliminate_common_subexpressions(graph: Graph) -> None:
    """Merge nodes with the same operator, inputs and attributes, e.g. an activation that every block repeats.

    Random operators are never merged, nor are outputs, which stay separate tensors.
    """
    first: dict[Any, str] = {}
    for node in graph:
        if node.name in graph.outputs or is_random(node):
            continue
        inputs = tuple(sorted(node.inputs.items()))
        key = operator_of(node).name, inputs, _key(node.attributes), node.shape, node.dtype
        original = first.setdefault(key, node.name)
        if original != node.name:
            graph.remove(node, instead=original)


def _key(attributes: Any) -> str:
    """Return attributes as text, which tells 1, 1.0 and True apart."""
    return repr(map_leaves(lambda leaf: leaf, attributes))


def drop_counters(graph: Graph, buffers: Mapping[int, str]) -> dict[int, int]:
    """Remove outputs that only add an integer to a buffer; return the increments by output index."""
    increments = {}
    for index, buffer in buffers.items():
        node = graph.nodes.get(graph.outputs[index])
        if (
            node is not None
            and set(node.inputs.values()) == {buffer}
            and (step := _increment(node)) is not None
        ):
            increments[index] = step
    kept = [index for index in range(len(graph.outputs)) if index not in increments]
    graph.outputs = tuple(graph.outputs[index] for index in kept)
    graph.output_types = tuple(graph.output_types[index] for index in kept)
    graph.remove_dead_code()
    return increments


def _increment(node: Node) -> int | None:
    """Return the integer that a node adds to a counter; None if it does anything else."""
    if node.calls != "add" or node.dtype != "int64":
        return None
    call = AtenCall(node)
    other = call("other")
    return other if type(other) is int and call("alpha", 1) == 1 and call.value("self") is not None else None
