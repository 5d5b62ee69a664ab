"""PyTorch operators without a node of our own, and those that are no-ops in a plan."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.utils._pytree as pytree

from escalade.engine.graph.aten import (
    OperatorError,
    has_rows,
    is_random_call,
    reject_trapping_division,
    resolve_operator,
    takes_any_layout,
    takes_rows,
    to_memory_order,
)
from escalade.engine.graph.graph import ATEN, ORDERS, READ, WRITTEN, Graph, Node, Reference, map_leaves
from escalade.engine.nodes.base import AtenCall, Layouts, Match, Matcher, Operator, Tensors
from escalade.engine.nodes.lowering import NHWC, OWN, ElementMove
from escalade.engine.nodes.movement import ATEN_MOVES
from escalade.errors import EscaladeError

_FACTORIES = frozenset("full_like ones_like zeros_like new_full new_ones new_zeros fill zero".split())
"""Operators whose result has the shape and dtype of an operand, but does not depend on its values."""
_FILL_ARGUMENTS = {"fill": "value", "full_like": "fill_value", "full": "fill_value", "new_full": "fill_value"}
_FILL_VALUES = {"ones_like": 1, "zeros_like": 0, "new_ones": 1, "new_zeros": 0, "ones": 1, "zeros": 0}
_NARROW = frozenset((torch.float16, torch.bfloat16))


class Aten(Operator):
    """A call of a PyTorch operator, by name and with its arguments."""

    name = ATEN

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return self.results(node, inputs)[node.attributes.get("result", 0)]

    def results(self, node: Node, inputs: Tensors) -> Sequence[torch.Tensor]:
        a = node.attributes
        return results_of(a["target"], a["arguments"], inputs, a.get(ORDERS, {}))

    def may_alias(self, node: Node) -> bool:
        returned = resolve_operator(node.attributes["target"])._schema.returns
        return any(result.alias_info is not None for result in returned)

    def element_moves(
        self, node: Node, inputs: Tensors, result: torch.Tensor
    ) -> Sequence[ElementMove] | None:
        moves = ATEN_MOVES.get(node.calls)
        if moves is None:
            return super().element_moves(node, inputs, result)

        def leaf(value: Any) -> Any:
            return inputs[value.role] if isinstance(value, Reference) else value

        return moves(map_leaves(leaf, node.attributes["arguments"]), result) if result.numel() else None

    def pytorch_constants(self, node: Node) -> Mapping[str, str]:
        """Return filters of images in NHWC, or cuDNN converts them in each call; other constants in their dtype."""
        forms = dict.fromkeys(node.inputs, OWN)
        is_convolution = "conv" in node.calls and len(node.shape) == 4
        weight = node.attributes["arguments"].get("weight")
        if is_convolution and isinstance(weight, Reference) and node.dtype != "float64":
            forms[weight.role] = NHWC
        return forms

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        """Return any layout, except for operators that may depend on strides and need NCHW.

        Such operators come from other libraries; in typed graphs also those that read NCHW images during capture. An
        image that PyTorch computes from values of other ranks is NCHW.
        """
        operator = resolve_operator(node.attributes["target"])
        is_planar = operator.namespace != "aten" or node.attributes.get(READ) == "nchw"
        if is_planar and not takes_any_layout(operator):
            return Layouts("nchw", "nchw")
        is_filled = not node.inputs or node.calls in _FACTORIES  # the same in every layout
        written = Layouts.common(given).written if given or is_filled else "nchw"
        return Layouts(None, node.attributes.get(WRITTEN, written))

    def title(self, node: Node) -> str:
        return str(node.attributes["target"])


def is_random(node: Node) -> bool:
    """Return True for random operators, which are never folded or merged."""
    if not Aten.matches(node):
        return False
    return is_random_call(resolve_operator(node.attributes["target"]), node.attributes["arguments"])


def call_of(node: Node) -> Hashable:
    """Return the same key for all results of one call; None for the result of an operator with one."""
    a = node.attributes
    if "call" in a or "result" not in a or is_random(node):
        return a.get("call")
    return a["target"], repr(a["arguments"]), *node.inputs.items()


def unread_inputs(node: Node) -> frozenset[str]:
    """Return the roles of inputs of which only dtype and shape matter."""
    if node.calls not in _FACTORIES:
        return frozenset()
    model = node.attributes["arguments"].get("self")
    return frozenset((model.role,)) if isinstance(model, Reference) else frozenset()


def fill_value(value: str, graph: Graph) -> float | None:
    """Return the number that a call fills a whole value with; None if it does anything else."""
    node = graph.nodes.get(value)
    if node is None or not Aten.matches(node) or not node.is_floating:
        return None
    name = node.calls
    fill = node.attributes["arguments"].get(_FILL_ARGUMENTS.get(name, ""), _FILL_VALUES.get(name))
    return float(fill) if type(fill) in (int, float) else None


def on_device(node: Node, device: torch.device) -> Node:
    """Return the call of a factory (`zeros`, `arange`) with `device` as its device argument.

    Without tensor operands an operator creates its result where the model was captured, and an engine may run
    elsewhere: compiled for another device, moved there, or loaded from a file.
    """
    if node.op != ATEN or node.inputs:
        return node
    arguments = resolve_operator(node.attributes["target"])._schema.arguments
    if not any(argument.name == "device" for argument in arguments):
        return node
    return node.with_attributes(arguments={**node.attributes["arguments"], "device": device})


def results_of(
    target: str,
    arguments: Mapping[str, Any],
    inputs: Tensors,
    orders: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> Sequence[torch.Tensor]:
    """Return all results of an operator; inputs by the roles that its arguments refer to.

    An operator that may ignore strides gets each operand dense, in the order of dimensions that `orders` has for its
    role, or in PyTorch's own.
    """
    home = next((tensor.device for tensor in inputs.values()), None)
    operator = resolve_operator(target)
    if not takes_any_layout(operator):
        keeps = takes_rows(operator)
        inputs = {
            role: tensor if keeps and has_rows(tensor) else to_memory_order(tensor, orders.get(role))
            for role, tensor in inputs.items()
        }

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.device):  # the plan's device, not that of capture
            return value if home is None else home
        return inputs[value.role] if isinstance(value, Reference) else value

    bound = map_leaves(leaf, arguments)
    if operator._schema.is_mutable:  # in a graph every result is a new value
        first = operator._schema.arguments[0].name
        bound[first] = bound[first].clone()
    reject_trapping_division(operator, bound)
    positional: list[Any] = []
    named: dict[str, Any] = {}
    for argument in operator._schema.arguments:
        if argument.name not in bound:
            continue
        if argument.kwarg_only or len(positional) < operator._schema.arguments.index(argument):
            named[argument.name] = bound[argument.name]
        else:
            positional.append(bound[argument.name])
    with reporting_errors(target):
        result = _call(operator, positional, named)
    return (result,) if isinstance(result, torch.Tensor) else result


def _call(operator: torch._ops.OpOverload, positional: list[Any], named: dict[str, Any]) -> Any:
    """Call an operator; in fp32 if PyTorch has no 16-bit implementation."""
    try:
        return operator(*positional, **named)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as refusal:
        leaves = pytree.tree_leaves((positional, named))
        narrow = {leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dtype in _NARROW}
        if len(narrow) != 1:
            raise
        (dtype,) = narrow
        wide_positional, wide_named = _cast((positional, named), dtype, torch.float32)
        try:
            result = operator(*wide_positional, **wide_named)
        except RuntimeError:
            raise refusal from None
        return _cast(result, torch.float32, dtype)


def _cast(values: Any, source: torch.dtype, target: torch.dtype) -> Any:
    """Cast all tensors of one dtype in a nested structure to another."""

    def leaf(value: Any) -> Any:
        return value.to(target) if isinstance(value, torch.Tensor) and value.dtype == source else value

    return pytree.tree_map(leaf, values)


@contextmanager
def reporting_errors(what: str) -> Iterator[None]:
    """Turn PyTorch's errors into OperatorError; errors about memory pass through."""
    try:
        yield
    except (EscaladeError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OperatorError(f"PyTorch cannot compute {what} on these tensors: {reason}") from error


# No-ops: operators whose result is an existing value of the plan.


def keeps_dtype(node: Node, x: str, graph: Graph) -> bool:
    """Return True if a plan stores `x` in the dtype that a node returns."""
    dtype, wanted = graph.dtype_of(x), getattr(torch, node.dtype)
    if graph.typed or torch.float64 in (dtype, wanted):
        return dtype is wanted
    return dtype.is_floating_point


def is_rounding(node: Node, graph: Graph) -> bool:
    """Return True if a call of an untyped graph rounds wider floating values to 16 bits, and does nothing else."""
    if graph.typed or node.calls not in ("to", "_to_copy"):
        return False
    operand = node.attributes["arguments"].get("self")
    source = graph.dtype_of(node.inputs[operand.role]) if isinstance(operand, Reference) else None
    is_wide = source is not None and source.is_floating_point and source.itemsize > 2
    return is_wide and getattr(torch, node.dtype) in (torch.float16, torch.bfloat16)


def _identity(node: Node, call: AtenCall, graph: Graph) -> Match:
    x = call.value("self") or call.value("input")
    return x if x is not None and graph.shape_of(x) == node.shape else None


def _broadcast(node: Node, call: AtenCall, graph: Graph) -> Match:
    """Match one of several tensors if it has the common shape already."""
    x = node.inputs[call("tensors")[node.attributes["result"]].role]
    return x if graph.shape_of(x) == node.shape else None


def _dropout(node: Node, call: AtenCall, graph: Graph) -> Match:
    return None if call("train", call("training", False)) else _identity(node, call, graph)


def _to(node: Node, call: AtenCall, graph: Graph) -> Match:
    """Match a cast between floating dtypes; one to 16 bits stays, since it rounds in fp32 plans too."""
    x = call.value("self")
    if x is None or not node.is_floating or x in graph.constants:
        return None
    if is_rounding(node, graph):
        return node
    return x if keeps_dtype(node, x, graph) else None


def _copy(node: Node, call: AtenCall, graph: Graph) -> Match:
    """Match a copy over all of another value."""
    x = call.value("src")
    if x is None or x in graph.constants or not node.is_floating or graph.shape_of(x) != node.shape:
        return None
    return x if keeps_dtype(node, x, graph) else None


IDENTITIES: dict[str, Matcher] = {
    **dict.fromkeys(("dropout", "dropout2d", "feature_dropout", "native_dropout"), _dropout),
    **dict.fromkeys(
        ("contiguous", "clone", "detach", "alias", "lift_fresh_copy", "expand", "expand_as"), _identity
    ),
    "broadcast_tensors": _broadcast,
    "to": _to,
    "_to_copy": _to,
    "copy": _copy,
}
"""Matchers of no-ops by the name of PyTorch's operator."""
