"""Nothing computed that is not used, and nothing computed twice that could be computed once."""

from __future__ import annotations

import math

import torch

from escalade.engine.graph.aten import OperatorError, resolve
from escalade.engine.graph.graph import ATEN, Batch, Graph, Node, map_leaves
from escalade.engine.nodes.reference import compute

MOST_GROWTH = 16
"""A constant may take this many times the numbers that it is made of; what grows more is cheaper to compute again."""
SMALL = 2**22
"""Elements that are folded however few numbers they come from."""


def remove_dead_code(graph: Graph) -> None:
    """Drops nodes and constants that no output depends on."""
    needed = set(graph.outputs)
    for node in reversed(tuple(graph)):
        if node.name in needed:
            needed.update(node.inputs.values())
        else:
            del graph.nodes[node.name]
    graph.constants = {name: tensor for name, tensor in graph.constants.items() if name in needed}


def fold_constants(graph: Graph) -> None:
    """What depends on constants alone is computed now."""
    made_of = {name: frozenset((name,)) for name in graph.constants}
    """The model's own constants that each one comes from."""
    sizes = {name: tensor.numel() for name, tensor in graph.constants.items()}
    for node in graph:
        if _is_random(node) or depends_on_batch(node):
            continue
        if any(name not in graph.constants for name in node.inputs.values()):
            continue
        origins = frozenset[str]().union(*(made_of[name] for name in node.inputs.values()))
        most = max(MOST_GROWTH * sum(sizes[name] for name in origins), SMALL)
        if origins and math.prod(node.shape) > most:  # type: ignore[arg-type]
            continue
        graph.constants[node.name] = _folded(graph, node)
        made_of[node.name] = origins
        del graph.nodes[node.name]


def _folded(graph: Graph, node: Node) -> torch.Tensor:
    """Summed in float64, rounded as the model rounds: each element is as near as its type allows."""
    given = {role: graph.constants[name] for role, name in node.inputs.items()}
    if node.is_floating:
        wide = {role: value.double() if value.is_floating_point() else value for role, value in given.items()}
        try:
            result = compute(node, wide)
        except OperatorError:  # an operator that insists on its types
            result = None
        if result is not None and result.is_floating_point() and tuple(result.shape) == node.shape:
            return result.to(getattr(torch, node.dtype)).contiguous()
    return compute(node, given).contiguous()


def _is_random(node: Node) -> bool:
    return node.op == ATEN and torch.Tag.nondeterministic_seeded in resolve(node.attributes["target"]).tags


def depends_on_batch(node: Node) -> bool:
    """Whether its sizes or its arguments do."""
    leaves: list[object] = []
    map_leaves(leaves.append, (node.attributes, node.shape))
    return any(isinstance(leaf, Batch) for leaf in leaves)
