"""Expressions that multiply and add constants along one axis, which the weights of a layer in front can hold."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.engine.graph.forms import is_finite
from escalade.engine.graph.graph import Graph, Node
from escalade.ops.expressions import FUNCTIONS, Expression, FunctionCall, Operand

Map = tuple[torch.Tensor | None, torch.Tensor]
"""A factor of the variable, if it is there at all, and a term."""


def channel_map(
    expression: Expression, node: Node, graph: Graph, axis: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """In float64, the factor and the term along an axis of the one input that is no constant; None where the node is
    something else, or where weights cannot hold them."""
    variables = [role for role in expression.inputs if node.inputs[role] not in graph.constants]
    if len(variables) != 1 or len(expression.results) != 1:
        return None
    constants = {}
    for role in expression.inputs:
        if role not in variables:
            tensor = graph.constants[node.inputs[role]]
            if tensor.dim() > len(node.shape) or not _is_along(tensor, axis - len(node.shape)):
                return None
            constants[role] = tensor.double().flatten()
    found = _affine(expression, constants)
    if found is None or found[0] is None:
        return None
    size = node.shape[axis]
    assert isinstance(size, int)
    return holdable(found[0].expand(size), found[1].expand(size))


def holdable(factor: torch.Tensor, term: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A factor and a term that the weights of a layer in front can hold: finite numbers. An infinity times a sum is no
    sum of infinities, whose signs may differ."""
    return (factor, term) if is_finite(factor.float()) and is_finite(term.float()) else None


def _is_along(tensor: torch.Tensor, axis: int) -> bool:
    """Whether all sizes but that of an axis, counted from the last, are one."""
    return tensor.numel() == (tensor.shape[axis] if -axis <= tensor.dim() else 1)


def _affine(expression: Expression, constants: Mapping[str, torch.Tensor]) -> Map | None:
    made: list[Map] = []

    def value(operand: Operand) -> Map:
        if isinstance(operand, int):
            return made[operand]
        if isinstance(operand, str):
            one, none = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
            return (None, constants[operand]) if operand in constants else (one, none)
        return None, torch.tensor([operand], dtype=torch.float64)

    for call in expression.calls:
        found = _mapped(call, [value(operand) for operand in call.operands])
        if found is None:
            return None
        made.append(found)
    return value(expression.results[0])


def _mapped(call: FunctionCall, operands: list[Map]) -> Map | None:
    """A function of maps, if it is one."""
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
