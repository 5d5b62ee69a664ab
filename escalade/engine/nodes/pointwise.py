"""Pointwise expressions: every pointwise PyTorch operator, and fusions of several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from escalade.engine.graph.aten import resolve_operator
from escalade.engine.graph.graph import Graph, Node, Reference, Shape, name_of
from escalade.engine.nodes.aten import fill_value, keeps_dtype
from escalade.engine.nodes.base import AtenCall, Match, Operator, Tensors
from escalade.engine.nodes.elementwise import lower_expression
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.pointwise_calls import TENSOR, expression_of
from escalade.engine.nodes.signature import (
    ANY,
    RESULT,
    Attribute,
    Attributes,
    Role,
    Signature,
    SizeError,
    Sizes,
)
from escalade.errors import UnsupportedError
from escalade.ops.expressions import Expression
from escalade.ops.expressions.expression import FunctionCall
from escalade.ops.expressions.text import Operand
from escalade.ops.shared.pointwise import result_names

ROLES = ("x", "a", "b", "c", "d", "e", "f", "g")
"""Roles of inputs: values of the result's shape first, then smaller ones, then constants."""
MAX_CALLS = 64  # functions per expression, limited by a kernel's registers
MAX_TEXT = 4096
_NO_REDUCTION, _MEAN = 0, 1
"""PyTorch's numbers for reductions of a loss."""
_MASKS = (torch.bool, torch.uint8)
"""Dtypes besides floating ones whose values fp32 represents exactly."""


def _is_expression(value: Any) -> bool:
    if type(value) is not str or len(value) > MAX_TEXT:
        return False
    try:
        expression = Expression.parse(value)
    except (UnsupportedError, RecursionError):
        return False
    return (
        len(expression.results) == 1
        and len(expression.calls) <= MAX_CALLS
        and set(expression.inputs) == set(ROLES[: len(expression.inputs)]) != set()
    )


_EXPRESSION = Attribute(
    f"an expression of one result, such as x * sigmoid(a), in the first of {', '.join(ROLES)}, with up to "
    f"{MAX_CALLS} functions",
    _is_expression,
)


class Pointwise(Operator):
    """y = expression(x, a, b, …), with broadcast inputs."""

    name = "pointwise"
    preferred_layout = None
    signature = Signature(
        {"x": ANY, **dict.fromkeys(ROLES[1:], Role(ANY.dimensions, optional=True))},
        {"expression": _EXPRESSION},
        floating=False,
        masks=True,
    )
    values = ROLES
    mixes_types = True

    def match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        """Match a pointwise operator, by its name or its decomposition."""
        operator = _functional(node.attributes["target"])
        if operator is None or "result" in node.attributes:
            return None
        if graph.typed and node.is_floating and node.calls == "expand":
            return self.instead_of(node, {"x": call.value("self")}, expression="x")  # readers broadcast
        arguments = {
            name: TENSOR if isinstance(value, Reference) else value
            for name, value in node.attributes["arguments"].items()
        }
        if not all(_is_plain(value) for value in arguments.values()):
            return None
        expression = _elementwise_expression(operator, arguments, node.shape)
        if expression is None:
            return None
        inputs = {name: call.value(name) for name in expression.inputs}
        if name_of(operator.name()) in ("prelu", "_prelu_kernel"):
            inputs["weight"] = _along_channels(graph, inputs["weight"], inputs["self"])
        values = {name: value for name, value in inputs.items() if value is not None}
        if len(values) < len(inputs) or not _has_supported_dtypes(node, values.values(), graph):
            return None
        numbers = {
            name: Expression((), (number,))
            for name, value in values.items()
            if (number := fill_value(value, graph)) is not None
        }
        return self.joined(node, expression.substitute(numbers), values, graph)

    @classmethod
    def joined(cls, node: Node, expression: Expression, values: Mapping[str, str], graph: Graph) -> Match:
        """Return a node for an expression of these values by input; the value itself for an identity.

        None if the expression is too large for one node or has another shape.
        """
        expression = _without_ones(expression)
        named = expression.rename({name: f"_{index}" for index, name in enumerate(expression.inputs)})
        used = dict.fromkeys(values[name] for name in expression.inputs)
        order = sorted(
            used, key=lambda value: (value in graph.constants, graph.shape_of(value) != node.shape)
        )
        if not 0 < len(order) <= len(ROLES) or broadcast(map(graph.shape_of, order)) != node.shape:
            return None
        roles = dict(zip(order, ROLES, strict=False))
        own = named.rename({f"_{index}": roles[values[name]] for index, name in enumerate(expression.inputs)})
        if own.is_identity and keeps_dtype(node, order[0], graph) and order[0] not in graph.constants:
            return order[0]
        if not _is_expression(own.text):
            return None
        inputs = {role: value for value, role in roles.items()}
        return cls.instead_of(node, inputs, expression=own.text)

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        return lower_expression(node, self.expression(node), forms)

    def expression(self, node: Node) -> Expression:
        return Expression.parse(node.attributes["expression"])

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        result = self._results(node, inputs)[0]
        if node.attributes["expression"] == "x":
            result = result.expand(node.shape)  # type: ignore[arg-type]
        return result if node.is_floating else result != 0

    def side_outputs(self, node: Node, inputs: Tensors) -> Tensors:
        """Return the results behind the first, which a training step may have."""
        results = self._results(node, inputs)
        names = result_names(self.expression(node))
        return {name: one.to(results[0].dtype) for name, one in zip(names[1:], results[1:], strict=True)}

    def _results(self, node: Node, inputs: Tensors) -> tuple[torch.Tensor, ...]:
        types = [value.dtype for value in inputs.values() if value.is_floating_point()]
        common = types[0] if types else torch.float32
        for dtype in types:
            common = torch.promote_types(common, dtype)
        return self.expression(node).evaluate({role: value.to(common) for role, value in inputs.items()})

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        given = {role: found for role, found in sizes.items() if role != RESULT}
        expected = Expression.parse(attributes["expression"]).inputs
        if set(given) != set(expected):
            raise SizeError(
                f"{attributes['expression']} takes {', '.join(expected)}; the inputs are {', '.join(given)}"
            )
        result = broadcast(given.values())
        if result is None:
            raise SizeError(f"{list(map(list, given.values()))} cannot be broadcast")
        return {RESULT: result}  # type: ignore[dict-item]


def broadcast(shapes: Iterable[Shape]) -> Shape | None:
    """Return the broadcast shape; None if these shapes cannot be broadcast."""
    all_shapes = list(shapes)
    rank = max(map(len, all_shapes))
    result: list[Any] = [1] * rank
    for shape in all_shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            if size != 1 and result[axis] not in (1, size):
                return None
            result[axis] = result[axis] if size == 1 else size
    return tuple(result)


def _functional(target: str) -> torch._ops.OpOverload | None:
    """Return the out-of-place variant of an operator; None if there is none."""
    operator: torch._ops.OpOverload | None = resolve_operator(target)
    assert operator is not None
    name, _, overload = target.partition(".")
    if operator._schema.is_mutable and name.endswith("_"):
        packet = getattr(torch.ops.aten, name.removeprefix("aten::")[:-1], None)
        operator = getattr(packet, overload or "default", None)
    if operator is None or operator._schema.is_mutable or len(operator._schema.returns) != 1:
        return None
    return operator


def _elementwise_expression(
    operator: torch._ops.OpOverload, arguments: Mapping[str, Any], shape: Shape
) -> Expression | None:
    """Return the expression of a call; for the gradient of a reduced loss, that of each term."""
    reduction = arguments.get("reduction", _NO_REDUCTION)
    if reduction == _NO_REDUCTION:
        return expression_of(operator, arguments)
    if not name_of(operator.name()).endswith("_backward") or not all(isinstance(size, int) for size in shape):
        return None
    each = expression_of(operator, {**arguments, "reduction": _NO_REDUCTION})
    if each is None or reduction != _MEAN:
        return each
    return Expression.parse(f"x * {1 / math.prod(shape)!r}").substitute({"x": each})  # type: ignore[arg-type]


def _without_ones(expression: Expression) -> Expression:
    """Remove products with 1, with which the gradient of a loss starts."""
    calls: list[FunctionCall] = []
    results: list[Operand] = []
    """Result of each original call, in terms of the remaining ones."""

    def moved(operand: Operand) -> Operand:
        return results[operand] if isinstance(operand, int) else operand

    for call in expression.calls:
        operands = tuple(map(moved, call.operands))
        rest = [one for one in operands if one != 1.0 or isinstance(one, int)]
        if call.function == "mul" and len(rest) == 1:
            results.append(rest[0])
        else:
            results.append(len(calls))
            calls.append(FunctionCall(call.function, operands))
    return Expression.of(calls, map(moved, expression.results))


def _is_plain(value: Any) -> bool:
    """Return True for tensors, numbers and options, the arguments of a pointwise operator."""
    return value is None or isinstance(
        value, bool | int | float | str | torch.dtype | torch.device | torch.layout | torch.memory_format
    )


def _has_supported_dtypes(node: Node, values: Iterable[str], graph: Graph) -> bool:
    """Return True for a floating or bool result of operands that fp32 can represent."""
    types = [graph.dtype_of(value) for value in values]
    are_known = all(dtype.is_floating_point or dtype in _MASKS for dtype in types)
    return are_known and (node.is_floating or (node.dtype == "bool" and torch.uint8 not in types))


def _along_channels(graph: Graph, weight: str | None, x: str | None) -> str | None:
    """Return a per-channel constant in a shape that broadcasts to x; None if it is not a constant."""
    if weight not in graph.constants or x is None:
        return None
    tensor, rank = graph.constants[weight], len(graph.shape_of(x))
    if tensor.numel() == 1 or tensor.dim() > 1 or rank < 2:
        return weight if tensor.numel() == 1 or tensor.dim() == rank else None
    return graph.derive_constant(f"{weight}_channels", weight, lambda one: one.view(-1, *[1] * (rank - 2)))
