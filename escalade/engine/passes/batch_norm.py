"""BatchNorm folded into the convolution or linear layer in front of it."""

from __future__ import annotations

from dataclasses import replace

import torch

from escalade.engine.graph.graph import Graph, Node


def fold_batch_norm(graph: Graph) -> None:
    """conv(x) * scale + shift is a convolution with other weights and another bias."""
    for node in graph:
        if node.op != "batch_norm":
            continue
        layer = graph.nodes.get(node.inputs["x"])
        if layer is None or layer.op not in ("conv2d", "linear") or layer.attributes["relu"]:
            continue
        if "residual" in layer.inputs or graph.only_user(layer.name) is not node:
            continue
        if layer.op == "linear" and len(layer.shape) != 2:
            continue  # what it normalises are the rows, not the features
        _fold(graph, layer, node)


def scale_and_shift(graph: Graph, norm: Node) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale and shift of a norm in float64, so that folding adds no rounding of its own."""
    weight, bias, mean, variance = (
        graph.constants[norm.inputs[role]].double() for role in ("weight", "bias", "mean", "variance")
    )
    scale = weight / torch.sqrt(variance + norm.attributes["epsilon"])
    return scale, bias - mean * scale


def _fold(graph: Graph, layer: Node, norm: Node) -> None:
    scale, shift = scale_and_shift(graph, norm)
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
    graph.remove(norm, instead=layer.name)
