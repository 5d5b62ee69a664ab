"""Values without elements: nothing has to be computed for them."""

from __future__ import annotations

import torch

from escalade.engine.graph.graph import Graph


def drop_empty(graph: Graph) -> None:
    """Makes constants of what has no elements in a graph whose sizes are numbers, and drops what was only for them."""
    empty = [node for node in graph if 0 in node.shape]
    if not empty:
        return
    home = graph.device
    for node in empty:
        del graph.nodes[node.name]
        dtype = getattr(torch, node.dtype)
        graph.constants[node.name] = torch.empty(node.shape, dtype=dtype, device=home)  # type: ignore[arg-type]
    graph.remove_dead_code()
