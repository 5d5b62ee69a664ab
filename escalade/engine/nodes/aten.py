"""PyTorch's own operators: what Escalade has no node of its own for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
import torch.utils._pytree as pytree

from escalade.engine.graph.aten import (
    OperatorError,
    is_random_call,
    reject_trapping_division,
    resolve_operator,
    takes_any_layout,
    to_memory_order,
)
from escalade.engine.graph.graph import ATEN, ORDERS, READ, WRITTEN, Node, Reference, map_leaves
from escalade.engine.nodes.aten_call import name_of
from escalade.engine.nodes.aten_movements import MOVEMENTS
from escalade.engine.nodes.base import Layouts, Operator, Tensors
from escalade.engine.nodes.lowering import NHWC, OWN, Moved
from escalade.errors import EscaladeError

_FRESH = frozenset("full_like ones_like zeros_like new_full new_ones new_zeros fill zero".split())
"""Operators that make a tensor like another one, whatever is in it."""
_REPEATING = frozenset(
    "expand expand_as broadcast_to repeat tile repeat_interleave broadcast_tensors".split()
)
"""Operators that repeat a tensor along dimensions, or some of it where a size is not one."""
_NARROW = frozenset((torch.float16, torch.bfloat16))


class Aten(Operator):
    """A call of one of PyTorch's operators, by name and with its arguments."""

    name = ATEN

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        """The operator's result, or that one of several which the node takes."""
        results = results_of(
            node.attributes["target"], node.attributes["arguments"], inputs, node.attributes.get(ORDERS, {})
        )
        return results[node.attributes.get("result", 0)]

    def may_share(self, node: Node) -> bool:
        returned = resolve_operator(node.attributes["target"])._schema.returns
        return any(result.alias_info is not None for result in returned)

    def moved(self, node: Node, inputs: Tensors, result: torch.Tensor) -> Sequence[Moved] | None:
        movement = MOVEMENTS.get(name_of(node.attributes["target"]))
        if movement is None:
            return super().moved(node, inputs, result)

        def leaf(value: Any) -> Any:
            return inputs[value.role] if isinstance(value, Reference) else value

        return movement(map_leaves(leaf, node.attributes["arguments"]), result) if result.numel() else None

    def constants_in_pytorch(self, node: Node) -> Mapping[str, str]:
        """An image's filters in the order of the image, or cuDNN would reorder them at every call; float64 as it is."""
        forms = dict.fromkeys(node.inputs, OWN)
        is_convolution = "conv" in name_of(node.attributes["target"]) and len(node.shape) == 4
        weight = node.attributes["arguments"].get("weight")
        if is_convolution and isinstance(weight, Reference) and node.dtype != "float64":
            forms[weight.role] = NHWC
        return forms

    def is_weight(self, node: Node, role: str) -> bool:
        """PyTorch's layers call theirs so."""
        return Reference(role) in (node.attributes["arguments"].get(name) for name in ("weight", "bias"))

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        """PyTorch reads everything as it lies, but for operators that may depend on it: those of other libraries, and
        in graphs that know how tensors lay when they were captured those that had images in PyTorch's order."""
        operator = resolve_operator(node.attributes["target"])
        is_planar = operator.namespace != "aten" or node.attributes.get(READ) == "nchw"
        if is_planar and not takes_any_layout(operator):
            return Layouts("nchw", "nchw")
        return Layouts(None, node.attributes.get(WRITTEN, Layouts.of_all(given).written))

    def repeated(self, node: Node) -> str | None:
        if name_of(node.attributes["target"]) not in _REPEATING:
            return None
        arguments = node.attributes["arguments"]
        given = (
            arguments["tensors"][node.attributes["result"]]
            if "result" in node.attributes
            else arguments.get("self")
        )
        return given.role if isinstance(given, Reference) else None

    def is_exact(self, node: Node) -> bool:
        return (
            super().is_exact(node) or torch.Tag.pointwise in resolve_operator(node.attributes["target"]).tags
        )

    def is_random(self, node: Node) -> bool:
        return is_random_call(resolve_operator(node.attributes["target"]), node.attributes["arguments"])

    def disregarded(self, node: Node) -> frozenset[str]:
        model = node.attributes["arguments"].get("self")
        is_fresh = name_of(node.attributes["target"]) in _FRESH and isinstance(model, Reference)
        return frozenset((model.role,)) if is_fresh else frozenset()

    def left_to_pytorch(self, node: Node) -> str:
        is_double = node.dtype == "float64"
        return "float64, which no kernel computes in" if is_double else super().left_to_pytorch(node)

    def title(self, node: Node) -> str:
        return str(node.attributes["target"])


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
        inputs = {role: to_memory_order(tensor, orders.get(role)) for role, tensor in inputs.items()}

    def leaf(value: Any) -> Any:
        if isinstance(value, torch.device):  # a plan's values are where the plan is
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
    with in_a_sentence(target):
        result = _called(operator, positional, named)
    return (result,) if isinstance(result, torch.Tensor) else result


def _called(operator: torch._ops.OpOverload, positional: list[Any], named: dict[str, Any]) -> Any:
    """The operator's result, computed in fp32 where PyTorch does not do it in 16 bits."""
    try:
        return operator(*positional, **named)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as refusal:
        given = pytree.tree_leaves((positional, named))
        narrow = {leaf.dtype for leaf in given if isinstance(leaf, torch.Tensor) and leaf.dtype in _NARROW}
        if len(narrow) != 1:
            raise
        (dtype,) = narrow
        wide_positional, wide_named = _retyped((positional, named), dtype, torch.float32)
        try:
            result = operator(*wide_positional, **wide_named)
        except RuntimeError:
            raise refusal from None
        return _retyped(result, torch.float32, dtype)


def _retyped(values: Any, given: torch.dtype, wanted: torch.dtype) -> Any:
    """A structure like this one, its tensors of the one dtype in the other."""

    def leaf(value: Any) -> Any:
        return value.to(wanted) if isinstance(value, torch.Tensor) and value.dtype == given else value

    return pytree.tree_map(leaf, values)


@contextmanager
def in_a_sentence(what: str) -> Iterator[None]:
    """What PyTorch has against a call; that memory has run out is for others to say."""
    try:
        yield
    except (EscaladeError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise OperatorError(f"PyTorch does not do {what} on these tensors: {reason}") from error
