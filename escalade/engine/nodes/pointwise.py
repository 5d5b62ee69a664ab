"""Any function of single elements: every pointwise operator of PyTorch's, and whatever is joined of several."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from escalade.engine.graph.aten import resolve_operator
from escalade.engine.graph.graph import ATEN, Graph, Node, Reference, Shape
from escalade.engine.nodes.aten_call import AtenCall, name_of
from escalade.engine.nodes.base import (
    Layouts,
    Operator,
    Recognised,
    Tensors,
    is_reordering,
    spread,
    unpermuted,
    with_channels,
)
from escalade.engine.nodes.identity import holds_as
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.pointwise_calls import TENSOR, expression_of
from escalade.engine.nodes.pointwise_lowering import lower_expression
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

ROLES = ("x", "a", "b", "c", "d", "e", "f", "g")
"""What the inputs of a node are called: values of its own sizes first, then smaller ones, then constants."""
MOST_CALLS = 64
"""Functions in one expression: what a kernel has registers for, and a reader patience."""
MOST_TEXT = 4096
_UNREDUCED, _MEAN = 0, 1
"""What PyTorch calls losses that are not summed up, and those whose mean is taken."""
_FILLED = {"fill": "value", "full_like": "fill_value", "full": "fill_value", "new_full": "fill_value"}
"""Calls that fill a value with a number, with the argument that it is."""
_FILLED_WITH = {"ones_like": 1, "zeros_like": 0, "new_ones": 1, "new_zeros": 0}
_MASKS = (torch.bool, torch.uint8)
"""Types besides those of floating point whose every value fp32 has."""


def _is_expression(value: Any) -> bool:
    if type(value) is not str or len(value) > MOST_TEXT:
        return False
    try:
        expression = Expression.parse(value)
    except (UnsupportedError, RecursionError):
        return False
    return (
        len(expression.results) == 1
        and len(expression.calls) <= MOST_CALLS
        and set(expression.inputs) == set(ROLES[: len(expression.inputs)]) != set()
    )


_EXPRESSION = Attribute(
    f"an expression of one result, such as x * sigmoid(a), in the first of {', '.join(ROLES)}, with up to "
    f"{MOST_CALLS} functions",
    _is_expression,
)
_FURTHER = Role(ANY.dimensions, optional=True)


class Pointwise(Operator):
    """y = expression(x, a, b, …), the inputs broadcast against each other."""

    name = "pointwise"
    signature = Signature(
        {"x": ANY, **dict.fromkeys(ROLES[1:], _FURTHER)}, {"expression": _EXPRESSION}, False, masks=True
    )
    values = ROLES
    mixes_types = True

    def recognise_rest(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        """A pointwise operator of PyTorch's, in its own words or by its decomposition."""
        operator = _functional(node.attributes["target"])
        if operator is None or "result" in node.attributes:
            return None
        if graph.typed and node.is_floating and name_of(node.attributes["target"]) == "expand":
            return self.instead_of(
                node, {"x": call.value("self")}, expression="x"
            )  # whoever reads it broadcasts
        given = {
            name: TENSOR if isinstance(value, Reference) else value
            for name, value in node.attributes["arguments"].items()
        }
        if not all(_is_plain(value) for value in given.values()):
            return None
        found = _of_terms(operator, given, node.shape)
        if found is None:
            return None
        inputs = {name: call.value(name) for name in found.inputs}
        if name_of(operator.name()) in ("prelu", "_prelu_kernel"):
            inputs["weight"] = _along_channels(graph, inputs["weight"], inputs["self"])
        values = {name: value for name, value in inputs.items() if value is not None}
        if len(values) < len(inputs) or not _has_types(node, values.values(), graph):
            return None
        numbers = {
            name: number for name, value in values.items() if (number := _filled(value, graph)) is not None
        }
        found = found.substitute(numbers)
        return self.joined(node, found, values, graph)

    @classmethod
    def joined(
        cls, node: Node, expression: Expression, values: Mapping[str, str], graph: Graph
    ) -> Recognised:
        """A node that computes an expression of these values, by input, in another's place; the value itself if it is
        that, and None if it is too much for one node or has other sizes."""
        expression = _without_ones(expression)
        named = expression.rename({name: f"_{place}" for place, name in enumerate(expression.inputs)})
        used = dict.fromkeys(values[name] for name in expression.inputs)
        order = sorted(
            used, key=lambda value: (value in graph.constants, graph.shape_of(value) != node.shape)
        )
        if not 0 < len(order) <= len(ROLES) or broadcast(map(graph.shape_of, order)) != node.shape:
            return None
        roles = dict(zip(order, ROLES, strict=False))
        own = named.rename({f"_{place}": roles[values[name]] for place, name in enumerate(expression.inputs)})
        if own.is_identity and holds_as(node, order[0], graph) and order[0] not in graph.constants:
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
        types = [value.dtype for value in inputs.values() if value.is_floating_point()]
        common = torch.float32
        for number, dtype in enumerate(types):
            common = torch.promote_types(common, dtype) if number else dtype
        (result,) = self.expression(node).evaluate({role: value.to(common) for role, value in inputs.items()})
        if node.attributes["expression"] == "x":
            result = result.expand(node.shape)  # type: ignore[arg-type]
        return result if node.is_floating else result != 0

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts.of_all(given)

    def before_permute(self, node: Node, order: tuple[int, ...], graph: Graph) -> Node:
        constants = {}
        for role, name in node.inputs.items():
            if name in graph.constants:
                constant = graph.constants[name]
                whole = constant.view(*[1] * (len(order) - constant.dim()), *constant.shape)
                moved = whole.permute([order.index(dim) for dim in range(len(order))])
                constants[role] = graph.add_constant(f"{node.name}_{role}", moved.contiguous())
        return unpermuted(node, order).with_inputs(**constants)

    def before_channels(self, node: Node, order: tuple[int, ...], channels: int, graph: Graph) -> Node | None:
        """A function of one image and of constants for its channels."""
        values = [name for name in node.inputs.values() if name not in graph.constants]
        if len(node.shape) != 4 or len(values) != 1 or not is_reordering(order, channels):
            return None
        if graph.shape_of(values[0]) != node.shape:
            return None
        constants = {}
        for role, name in node.inputs.items():
            tensor = graph.constants.get(name)
            if tensor is not None and tensor.dim() >= 3 and tensor.shape[-3] > 1:
                moved = spread(tensor, tensor.dim() - 3, order, channels)
                constants[role] = graph.add_constant(f"{node.name}_{role}", moved)
        return with_channels(node, channels).with_inputs(**constants)

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        given = {role: found for role, found in sizes.items() if role != RESULT}
        wanted = Expression.parse(attributes["expression"]).inputs
        if set(given) != set(wanted):
            raise SizeError(
                f"{attributes['expression']} is of {', '.join(wanted)}, not of {', '.join(given)}"
            )
        result = broadcast(given.values())
        if result is None:
            raise SizeError(f"{list(map(list, given.values()))} cannot be broadcast against each other")
        return {RESULT: result}  # type: ignore[dict-item]


def broadcast(shapes: Iterable[Shape]) -> Shape | None:
    """The sizes that values of these have together; None if they do not go together."""
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
    """The operator of that name that makes a new tensor; None if there is none."""
    operator: torch._ops.OpOverload | None = resolve_operator(target)
    assert operator is not None
    name, _, overload = target.partition(".")
    if operator._schema.is_mutable and name.endswith("_"):
        packet = getattr(torch.ops.aten, name.removeprefix("aten::")[:-1], None)
        operator = getattr(packet, overload or "default", None)
    if operator is None or operator._schema.is_mutable or len(operator._schema.returns) != 1:
        return None
    return operator


def _of_terms(operator: torch._ops.OpOverload, given: Mapping[str, Any], shape: Shape) -> Expression | None:
    """What a call computes; the gradient of a loss, whose terms are summed up, as that of each term."""
    reduction = given.get("reduction", _UNREDUCED)
    if reduction == _UNREDUCED:
        return expression_of(operator, given)
    if not name_of(operator.name()).endswith("_backward") or not all(isinstance(size, int) for size in shape):
        return None
    each = expression_of(operator, {**given, "reduction": _UNREDUCED})
    if each is None or reduction != _MEAN:
        return each
    return Expression.parse(f"x * {1 / math.prod(shape)!r}").substitute({"x": each})  # type: ignore[arg-type]


def _without_ones(expression: Expression) -> Expression:
    """The expression without products with one, which the gradient of a loss begins with."""
    calls: list[FunctionCall] = []
    places: list[Operand] = []
    """What each of the calls is, among those that are left."""

    def moved(operand: Operand) -> Operand:
        return places[operand] if isinstance(operand, int) else operand

    for call in expression.calls:
        operands = tuple(map(moved, call.operands))
        rest = [one for one in operands if one != 1.0 or isinstance(one, int)]
        if call.function == "mul" and len(rest) == 1:
            places.append(rest[0])
        else:
            places.append(len(calls))
            calls.append(FunctionCall(call.function, operands))
    return Expression.of(calls, map(moved, expression.results))


def _filled(value: str, graph: Graph) -> Expression | None:
    """The number that a call has filled a whole value with; None if it is none."""
    node = graph.nodes.get(value)
    if node is None or node.op != ATEN or not node.is_floating:
        return None
    name = name_of(node.attributes["target"])
    filled = node.attributes["arguments"].get(_FILLED.get(name, ""), _FILLED_WITH.get(name))
    return Expression((), (float(filled),)) if type(filled) in (int, float) else None


def _is_plain(value: Any) -> bool:
    """Whether an argument is a tensor, a number, or a word for how to compute."""
    return value is None or isinstance(
        value, bool | int | float | str | torch.dtype | torch.device | torch.layout | torch.memory_format
    )


def _has_types(node: Node, values: Iterable[str], graph: Graph) -> bool:
    """Whether the result is of floating point or a truth value, computed from what fp32 can hold."""
    types = [graph.dtype_of(value) for value in values]
    known = all(dtype.is_floating_point or dtype in _MASKS for dtype in types)
    return known and (node.is_floating or (node.dtype == "bool" and torch.uint8 not in types))


def _along_channels(graph: Graph, weight: str | None, x: str | None) -> str | None:
    """A constant for each channel, with the dimensions that broadcasting it takes; None if it is none."""
    if weight not in graph.constants or x is None:
        return None
    tensor, rank = graph.constants[weight], len(graph.shape_of(x))
    if tensor.numel() == 1 or tensor.dim() > 1 or rank < 2:
        return weight if tensor.numel() == 1 or tensor.dim() == rank else None
    return graph.add_constant(f"{weight}_channels", tensor.view(-1, *[1] * (rank - 2)))
