"""Fold BatchNorm and other per-channel scales into the preceding convolution, linear layer or norm."""

from __future__ import annotations

import torch

from escalade.engine.graph.forms import STORAGE, is_finite
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.base import activation_of
from escalade.engine.nodes.batch_norm import BatchNorm
from escalade.engine.nodes.conv2d import Conv2d, ConvTranspose2d
from escalade.engine.nodes.linear import Linear
from escalade.engine.nodes.norms import GroupNorm, LayerNorm
from escalade.engine.passes.channel_scale import channel_scale


def fold_batch_norm(graph: Graph, dtype: str = "fp32") -> None:
    """Replace conv(x) * scale + shift by a convolution with new weights and bias, if the weights fit the dtype."""
    for node in graph:
        values = {name for name in node.inputs.values() if name not in graph.constants}
        layer = graph.nodes.get(values.pop()) if len(values) == 1 else None
        axis = None if layer is None or layer.shape != node.shape else scaled_axis(layer)
        if layer is None or axis is None or graph.only_user(layer.name) is not node:
            continue
        factors = channel_scale(node, graph, axis)
        if factors is not None and _fold(graph, layer, *factors, STORAGE[dtype]):
            graph.remove(node, instead=layer.name)


def scaled_axis(layer: Node) -> int | None:
    """Return the axis of the result along which weight and bias can absorb a scale and a shift."""
    is_known = any(
        kind.matches(layer) for kind in (Conv2d, ConvTranspose2d, BatchNorm, GroupNorm, Linear, LayerNorm)
    )
    if not is_known or not activation_of(layer).is_identity or "residual" in layer.inputs:
        return None
    is_last = Linear.matches(layer) or (LayerNorm.matches(layer) and not layer.attributes.get("of_channels"))
    return len(layer.shape) - 1 if is_last else 1


def _scaled_weight(layer: Node, weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if ConvTranspose2d.matches(layer):
        # Its weight has the output channels of each group in the second dimension.
        groups = layer.attributes["groups"]
        return (weight.double().unflatten(0, (groups, -1)) * scale.view(groups, 1, -1, 1, 1)).flatten(0, 1)
    return weight.double() * scale.view(-1, *[1] * (weight.dim() - 1))


def _fold(graph: Graph, layer: Node, scale: torch.Tensor, shift: torch.Tensor, storage: torch.dtype) -> bool:
    """Fold in float64, to add no rounding; return False if the new weights overflow their storage type.

    Such weights would be rejected, while the two separate layers may be representable.
    """
    weight = graph.constants[layer.inputs["weight"]] if "weight" in layer.inputs else torch.ones_like(scale)
    folded = _scaled_weight(layer, weight, scale)
    if not is_finite(folded.to(storage)):
        return False
    if "bias" in layer.inputs:
        shift = shift + graph.constants[layer.inputs["bias"]].double() * scale
    graph.nodes[layer.name] = layer.with_inputs(
        weight=graph.add_constant(f"{layer.name}_weight", folded.float()),
        bias=graph.add_constant(f"{layer.name}_bias", shift.float()),
    )
    return True
