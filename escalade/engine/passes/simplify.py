"""Nothing computed that is not used, and nothing computed twice that could be computed once."""

from __future__ import annotations

import torch

from escalade.engine.graph import ATEN, Batch, Graph, Node, map_leaves
from escalade.engine.reference import compute, resolve


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
    for node in graph:
        if _is_random(node) or _depends_on_batch(node):
            continue
        if all(name in graph.constants for name in node.inputs.values()):
            given = {role: graph.constants[name] for role, name in node.inputs.items()}
            graph.constants[node.name] = compute(node, given)
            del graph.nodes[node.name]


def _is_random(node: Node) -> bool:
    return node.op == ATEN and torch.Tag.nondeterministic_seeded in resolve(node.attributes["target"]).tags


def _depends_on_batch(node: Node) -> bool:
    leaves: list[object] = []
    map_leaves(leaves.append, (node.attributes, node.shape))
    return any(isinstance(leaf, Batch) for leaf in leaves)
