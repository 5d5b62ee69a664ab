"""Nodes that multiply and add constants along one axis, and folding them into the layer before."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.engine.graph.forms import STORAGE, is_finite
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.base import activation_of
from escalade.engine.nodes.batch_norm import STATISTICS, BatchNorm
from escalade.engine.nodes.conv2d import Conv2d, ConvTranspose2d
from escalade.engine.nodes.conv3d import Conv3d
from escalade.engine.nodes.linear import Linear
from escalade.engine.nodes.norms import GroupNorm, LayerNorm
from escalade.ops.expressions import FUNCTIONS, Expression, FunctionCall, Operand

ScaleShift = tuple[torch.Tensor, torch.Tensor]
_Affine = tuple[torch.Tensor | None, torch.Tensor]
"""Factor of the variable, None for a constant, and term."""


def channel_scale(node: Node, graph: Graph, axis: int) -> ScaleShift | None:
    """Return scale and shift along `axis`, in float64, of a node that computes x * scale + shift of one value x."""
    if BatchNorm.matches(node):
        return _batch_norm_scale(node, graph) if axis == 1 else None
    expression = operator_of(node).expression(node)
    return None if expression is None else _expression_scale(expression, node, graph, axis)


def _batch_norm_scale(node: Node, graph: Graph) -> ScaleShift | None:
    if not activation_of(node).is_identity or "residual" in node.inputs:
        return None
    constants = [graph.constants[node.inputs[role]] for role in STATISTICS]
    # On the CPU: loading the kernels that a GPU needs for this takes longer.
    weight, bias, mean, variance = (tensor.cpu().double() for tensor in constants)
    scale = weight / torch.sqrt(variance + node.attributes["epsilon"])
    found = _if_finite(scale, bias - mean * scale)
    return None if found is None else (found[0].to(constants[0].device), found[1].to(constants[0].device))


def _expression_scale(expression: Expression, node: Node, graph: Graph, axis: int) -> ScaleShift | None:
    variables = [role for role in expression.inputs if node.inputs[role] not in graph.constants]
    if len(variables) != 1 or len(expression.results) != 1:
        return None
    constants = {}
    for role in expression.inputs:
        if role not in variables:
            tensor = graph.constants[node.inputs[role]]
            if tensor.dim() > len(node.shape) or not _varies_only_along(tensor, axis - len(node.shape)):
                return None
            constants[role] = tensor.double().flatten()
    found = _affine(expression, constants)
    if found is None or found[0] is None:
        return None
    size = node.shape[axis]
    assert isinstance(size, int)
    return _if_finite(found[0].expand(size), found[1].expand(size))


def _if_finite(scale: torch.Tensor, shift: torch.Tensor) -> ScaleShift | None:
    """Reject values that weights cannot absorb: infinity times a sum is not a sum of infinities of one sign."""
    return (scale, shift) if is_finite(scale.float()) and is_finite(shift.float()) else None


def _varies_only_along(tensor: torch.Tensor, axis: int) -> bool:
    """Return True if all sizes but that of `axis`, counted from the last, are 1."""
    return tensor.numel() == (tensor.shape[axis] if -axis <= tensor.dim() else 1)


def _affine(expression: Expression, constants: Mapping[str, torch.Tensor]) -> _Affine | None:
    results: list[_Affine] = []

    def value(operand: Operand) -> _Affine:
        if isinstance(operand, int):
            return results[operand]
        if isinstance(operand, str):
            one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
            return (None, constants[operand]) if operand in constants else (one, zero)
        return None, torch.tensor([operand], dtype=torch.float64)

    for call in expression.calls:
        result = _apply(call, [value(operand) for operand in call.operands])
        if result is None:
            return None
        results.append(result)
    return value(expression.results[0])


def _apply(call: FunctionCall, operands: list[_Affine]) -> _Affine | None:
    """Apply a function to affine maps; None if the result is not affine."""
    if all(factor is None for factor, _ in operands):
        return None, FUNCTIONS[call.function].compute(*(term for _, term in operands))
    match call.function, operands:
        case "neg", [(factor, term)]:
            return _times(factor, torch.tensor(-1.0)), -term
        case "add", [(a, p), (b, q)]:
            return _sum(a, b), p + q
        case "sub", [(a, p), (b, q)]:
            return _sum(a, _times(b, torch.tensor(-1.0))), p - q
        case ("mul", [(factor, term), (None, by)]) | ("mul", [(None, by), (factor, term)]):
            return _times(factor, by), term * by
        case "div", [(factor, term), (None, by)]:
            return _times(factor, 1 / by), term / by
    return None


def _times(factor: torch.Tensor | None, by: torch.Tensor) -> torch.Tensor | None:
    return None if factor is None else factor * by


def _sum(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    return b if a is None else a if b is None else a + b


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
        kind.matches(layer)
        for kind in (Conv2d, Conv3d, ConvTranspose2d, BatchNorm, GroupNorm, Linear, LayerNorm)
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
    constants = graph.add_constants(layer.name, {"weight": folded.float(), "bias": shift.float()})
    graph.nodes[layer.name] = layer.with_inputs(**constants)
    return True
