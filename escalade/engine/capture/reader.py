"""Reads an exported program, node by node, into a graph."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from escalade.engine.capture.model_copy import Original
from escalade.engine.graph.aten import order_of, strangeness, takes_any_layout
from escalade.engine.graph.graph import (
    ATEN,
    ORDERS,
    READ,
    WRITTEN,
    Dimension,
    Graph,
    Input,
    Node,
    Reference,
    Shape,
    map_leaves,
)
from escalade.engine.nodes.recognition import recognise_captured
from escalade.errors import UnsupportedError

_NORMS = (torch.ops.aten.native_layer_norm.default, torch.ops.aten.native_group_norm.default)


class CaptureError(UnsupportedError):
    """The model is not a graph of tensor operations."""


class FxReader:
    """The calls of a graph of `torch.fx`, one after another."""

    def __init__(self) -> None:
        self._values: dict[torch.fx.Node, str] = {}
        """What each tensor holds by now; of those changed in place, the tensor that they all are."""
        self._same: dict[torch.fx.Node, torch.fx.Node] = {}
        """The results of operations in place, and the tensors that they are."""

    def _take(self, graph: Graph, inputs: Sequence[torch.fx.Node], names: Sequence[str]) -> None:
        """The graph's inputs, by the model's names for them: `torch.fx` has others for those of Python's own."""
        for node, name in zip(inputs, names, strict=True):
            self._values[node] = graph.fresh(name)
            graph.inputs = (*graph.inputs, replace(self._input(node), name=self._values[node]))

    def _input(self, node: torch.fx.Node) -> Input:
        value = node.meta["val"]
        return Input(node.name, self._shape(value), dtype_name(value.dtype))

    def _value(self, node: torch.fx.Node) -> str:
        return self._values[self._same.get(node, node)]

    def _shape(self, value: torch.Tensor) -> Shape:
        return tuple(self._dimension(size) for size in value.shape)

    def _dimension(self, size: Any) -> Dimension:
        """A number, or so many for each item of the batch."""
        if isinstance(size, int):
            return size
        raise CaptureError(
            "the model takes a size out of a tensor's values; a plan's sizes are fixed beforehand"
        )

    def _call(self, graph: Graph, fx: torch.fx.Node) -> None:
        value = fx.meta.get("val")
        call, result = fx, None
        if fx.target is operator.getitem and isinstance(fx.args[0], torch.fx.Node):
            call, result = fx.args[0], fx.args[1]  # one of several results: the operation runs for each
        target = call.target
        if isinstance(value, (torch.SymFloat, torch.SymBool, float, bool)):
            raise CaptureError(f"{target} takes a value out of a tensor; a plan cannot depend on values")
        if isinstance(value, (tuple, list, type(None), torch.SymInt, int)):
            return  # sizes and results in several parts: whoever uses them reads them from their node
        if not isinstance(target, torch._ops.OpOverload) or not isinstance(value, torch.Tensor):
            name = getattr(target, "__name__", target)
            raise CaptureError(f"{name} is no tensor operation; a plan runs the same operations every time")
        self._look_at(call, target)
        node = self._node(graph, fx, call, target, value)
        if result is not None:
            node = node.with_attributes(result=result, **({"call": call.name} if graph.typed else {}))
        known = recognise_captured(node, target, graph)
        if isinstance(known, str):  # it changes nothing
            name = known
        else:
            graph.append(known)
            name = known.name
        tensor = fx
        if mutates(call):
            changed = call.args[0]
            assert isinstance(changed, torch.fx.Node)
            tensor = self._same[fx] = self._same.get(changed, changed)
            graph.changes_inputs |= tensor.op == "placeholder" and tensor.name not in graph.constants
        self._values[tensor] = name  # from here on that tensor is this, whoever holds it

    def _node(
        self,
        graph: Graph,
        fx: torch.fx.Node,
        call: torch.fx.Node,
        target: torch._ops.OpOverload,
        value: torch.Tensor,
    ) -> Node:
        inputs: dict[str, str] = {}
        tensors: dict[str, torch.Tensor] = {}

        def leaf(argument: Any) -> Any:
            if not isinstance(argument, torch.fx.Node):
                return self._plain(argument)
            meta = argument.meta["val"]
            if not isinstance(meta, torch.Tensor):
                return self._dimension(meta)
            role = f"in{len(inputs)}"
            inputs[role] = self._value(argument)
            tensors[role] = meta
            return Reference(role)

        names = [argument.name for argument in target._schema.arguments]
        bound = dict(zip(names, call.args, strict=False)) | dict(call.kwargs)
        attributes = {"target": target.name(), "arguments": map_leaves(leaf, bound)}
        if graph.typed:
            attributes |= _layouts(target, tensors, value)
        return Node(
            graph.fresh(fx.name), ATEN, inputs, attributes, self._shape(value),
            dtype_name(_dtype(fx, target, bound, value)), self._source(call),
        )  # fmt: skip

    def _plain(self, argument: Any) -> Any:
        """An argument that is no value of the graph."""
        return argument

    def _look_at(self, call: torch.fx.Node, target: torch._ops.OpOverload) -> None:
        """Refuses a call that the graph cannot hold."""

    def _source(self, call: torch.fx.Node) -> str:
        """The module that an operation belongs to."""
        return ""


def _is_image(value: torch.Tensor) -> bool:
    return value.dim() == 4 and value.is_floating_point()


def _is_planar(image: torch.Tensor) -> bool:
    """Whether an image lies in PyTorch's order of dimensions, and not in NHWC as well."""
    return image.is_contiguous() and not image.is_contiguous(memory_format=torch.channels_last)


def _layouts(
    target: torch._ops.OpOverload, tensors: Mapping[str, torch.Tensor], result: torch.Tensor
) -> dict[str, Any]:
    """Return how the operands of a call were stored when it was captured, where an operator may depend on it."""
    orders = {role: order_of(tensor) for role, tensor in tensors.items()}
    others = {role: order for role, order in orders.items() if order is not None}
    kept = {} if takes_any_layout(target) or not others else {ORDERS: others}
    images = [tensor for tensor in tensors.values() if _is_image(tensor)]
    if any(map(_is_planar, images)):
        return {READ: "nchw", **kept}
    return {WRITTEN: "nchw", **kept} if images and _is_image(result) and _is_planar(result) else kept


def note_changes(graph: Graph) -> None:
    if graph.changes_inputs:
        graph.notes.append("the model writes to its input; the engine leaves the caller's tensor as it is")


class Copies:
    """The engine's own weights, so that it stays as it is when the model is trained on; shared ones stay shared."""

    def __init__(self, original: Original) -> None:
        self._original = original
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """What the model's copies hold is nobody else's; a tensor from elsewhere, a global one, may be."""
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if not tensor.numel() or key not in self._made:
            own = self._original.owns(tensor)
            self._made[key] = tensor.detach() if own else tensor.detach().clone()
        return self._made[key]


def _dtype(
    fx: torch.fx.Node, target: torch._ops.OpOverload, arguments: Mapping[str, Any], value: torch.Tensor
) -> torch.dtype:
    """The type of a result.

    On the CPU a norm of 16-bit rows with fp32 weights gives its mean and its deviation in fp32. PyTorch's fake kernels
    say 16 bits, to which a plan would round them.
    """
    weight = arguments.get("weight")
    if target in _NORMS and fx.args[1:] in ((1,), (2,)) and isinstance(weight, torch.fx.Node):
        found: torch.dtype = weight.meta["val"].dtype
        return found
    return value.dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def mutates(node: torch.fx.Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and bool(node.args)
        and isinstance(node.args[0], torch.fx.Node)
    )


def refuse_strange(graph: torch.fx.Graph) -> None:
    """Refuses calls of other libraries' operators that do more than to compute new tensors."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace != "aten":
            reason = strangeness(node.target)
            if reason is not None:
                raise CaptureError(f"{node.target.name()} {reason}; compile the parts of the model around it")


def tangled(graph: torch.fx.Graph) -> bool:
    """Whether a value is changed in place of which there is a view by then, or several are in one call: PyTorch has to
    untangle that."""
    owner: dict[torch.fx.Node, torch.fx.Node] = {}
    viewed: set[torch.fx.Node] = set()
    for node in graph.nodes:
        first = node.args[0] if node.args else None
        writes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        if writes and not (mutates(node) and isinstance(node.meta.get("val"), torch.Tensor)):
            return True
        if not isinstance(first, torch.fx.Node):
            continue
        memory = owner.get(first, first)
        if mutates(node):
            if memory in viewed:
                return True
            owner[node] = memory
        elif _is_view(node) or node.target is operator.getitem:
            viewed.add(memory)
            owner[node] = memory
    return False


def _is_view(node: torch.fx.Node) -> bool:
    """Whether it shares memory with its first argument."""
    return isinstance(node.target, torch._ops.OpOverload) and any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in node.target._schema.returns
    )
