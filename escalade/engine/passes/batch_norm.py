"""Fold BatchNorm and other per-channel scales into the preceding convolution, linear layer or norm."""

from __future__ import annotations

from dataclasses import replace

import torch

from escalade.engine.graph.forms import STORAGE, is_finite
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of


def fold_batch_norm(graph: Graph, dtype: str = "fp32") -> None:
    """Replace conv(x) * scale + shift by a convolution with new weights and bias, if the weights fit the dtype."""
    for node in graph:
        values = {name for name in node.inputs.values() if name not in graph.constants}
        layer = graph.nodes.get(values.pop()) if len(values) == 1 else None
        axis = None if layer is None or layer.shape != node.shape else _scaled_axis(layer)
        if layer is None or axis is None or graph.only_user(layer.name) is not node:
            continue
        factors = operator_of(node).channel_scale(node, graph, axis)
        if factors is not None and _fold(graph, layer, *factors, STORAGE[dtype]):
            graph.remove(node, instead=layer.name)


def _scaled_axis(layer: Node) -> int | None:
    operator = operator_of(layer)
    is_bare = operator.applied(layer).is_identity and "residual" not in layer.inputs
    return operator.scaled_axis(layer) if is_bare else None


def _fold(graph: Graph, layer: Node, scale: torch.Tensor, shift: torch.Tensor, storage: torch.dtype) -> bool:
    """Fold in float64, to add no rounding; return False if the new weights overflow their storage type.

    Such weights would be rejected, while the two separate layers may be representable.
    """
    weight = graph.constants[layer.inputs["weight"]] if "weight" in layer.inputs else torch.ones_like(scale)
    folded = operator_of(layer).scaled_weight(layer, weight, scale)
    if not is_finite(folded.to(storage)):
        return False
    if "bias" in layer.inputs:
        shift = shift + graph.constants[layer.inputs["bias"]].double() * scale
    inputs = {
        **layer.inputs,
        "weight": graph.add_constant(f"{layer.name}_weight", folded.float()),
        "bias": graph.add_constant(f"{layer.name}_bias", shift.float()),
    }
    graph.nodes[layer.name] = replace(layer, inputs=inputs)
    return True
