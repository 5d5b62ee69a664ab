"""What depends on constants alone, computed once instead of at each call."""

from __future__ import annotations

import math

import torch

from escalade.engine.graph.aten import OperatorError
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.evaluate import compute

MOST_GROWTH = 16
"""A constant may take this many times the numbers that it is made of; what grows more is cheaper to compute again."""
SMALL = 2**22
"""Elements that are folded however few numbers they come from."""


def fold_constants(graph: Graph) -> None:
    """What depends on constants alone is computed now."""
    made_of = {name: frozenset((name,)) for name in graph.constants}
    """The model's own constants that each one comes from."""
    sizes = {name: tensor.numel() for name, tensor in graph.constants.items()}
    for node in graph:
        if operator_of(node).is_random(node) or node.depends_on_batch:
            continue
        unread = operator_of(node).disregarded(node)
        read = [name for role, name in node.inputs.items() if role not in unread]
        if any(name not in graph.constants for name in read):
            continue
        origins = frozenset[str]().union(*(made_of[name] for name in read))
        most = max(MOST_GROWTH * sum(sizes[name] for name in origins), SMALL)
        if (origins or unread) and math.prod(node.shape) > most:  # type: ignore[arg-type]
            continue
        graph.constants[node.name] = _folded(graph, node)
        made_of[node.name] = origins
        del graph.nodes[node.name]


def _folded(graph: Graph, node: Node) -> torch.Tensor:
    """Summed in float64, rounded as the model rounds: each element is as near as its type allows."""
    given = {role: _constant(graph, name) for role, name in node.inputs.items()}
    if node.is_floating:
        wide = {role: value.double() if value.is_floating_point() else value for role, value in given.items()}
        try:
            result = compute(node, wide, graph.device)
        except OperatorError:  # an operator that insists on its types
            result = None
        if result is not None and result.is_floating_point() and tuple(result.shape) == node.shape:
            return result.to(getattr(torch, node.dtype)).contiguous()
    return compute(node, given, graph.device).contiguous()


def _constant(graph: Graph, name: str) -> torch.Tensor:
    """A constant; for a value that does not count, zeros of its type, and of its sizes if they are known."""
    if name in graph.constants:
        return graph.constants[name].to(graph.device)  # a model may have tensors of its own on another device
    sizes = [size for size in graph.shape_of(name) if isinstance(size, int)]
    known = len(sizes) == len(graph.shape_of(name))
    return torch.zeros((), dtype=graph.dtype_of(name), device=graph.device).expand(sizes if known else ())
