"""Removal of values without elements."""

from __future__ import annotations

import torch

from escalade.engine.graph.graph import Graph


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
