"""Nothing computed that is not used, and nothing computed twice that could be computed once."""

from __future__ import annotations

from escalade.engine.graph import ATEN, Graph
from escalade.engine.reference import compute


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
        if node.op == ATEN and not node.inputs:
            continue  # made from nothing: it may be random
        if all(name in graph.constants for name in node.inputs.values()):
            given = {role: graph.constants[name] for role, name in node.inputs.items()}
            graph.constants[node.name] = compute(node, given)
            del graph.nodes[node.name]
