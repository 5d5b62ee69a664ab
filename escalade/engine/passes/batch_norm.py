"""BatchNorm folded into the convolution or linear layer in front of it."""

from __future__ import annotations

from dataclasses import replace

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.base import NO_ACTIVATION


def fold_batch_norm(graph: Graph) -> None:
    """conv(x) * scale + shift is a convolution with other weights and another bias."""
    for node in graph:
        layer = graph.nodes.get(node.inputs.get("x", ""))
        if layer is None or not _holds_scales(layer) or graph.only_user(layer.name) is not node:
            continue
        factors = operator_of(node).channel_scale(node, graph)
        if factors is not None:
            _fold(graph, layer, *factors)
            graph.remove(node, instead=layer.name)


def _holds_scales(layer: Node) -> bool:
    """Whether its weight and bias are all that its result is made with."""
    operator = operator_of(layer)
    return (
        operator.folds_channel_scale(layer)
        and operator.applied_activation(layer) == NO_ACTIVATION
        and "residual" not in layer.inputs
    )


def _fold(graph: Graph, layer: Node, scale: torch.Tensor, shift: torch.Tensor) -> None:
    """Folds in float64, so that it adds no rounding of its own."""
    weight = graph.constants[layer.inputs["weight"]]
    folded = weight.double() * scale.view(-1, *[1] * (weight.dim() - 1))
    if "bias" in layer.inputs:
        shift = shift + graph.constants[layer.inputs["bias"]].double() * scale
    inputs = {
        **layer.inputs,
        "weight": graph.add_constant(f"{layer.name}_weight", folded.float()),
        "bias": graph.add_constant(f"{layer.name}_bias", shift.float()),
    }
    graph.nodes[layer.name] = replace(layer, inputs=inputs)
