"""Conversion of `torch.fx` graphs of ATen calls into graphs, shared by all kinds of capture."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from escalade.engine.capture.model_copy import OriginalModel
from escalade.engine.graph.aten import bound_arguments, memory_order, side_effect, takes_any_layout
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
    dtype_name,
    map_leaves,
)
from escalade.engine.nodes.matching import match_captured
from escalade.errors import UnsupportedError

_NORMS = (torch.ops.aten.native_layer_norm.default, torch.ops.aten.native_group_norm.default)


class CaptureError(UnsupportedError):
    """The model is not a graph of tensor operations."""


class FxReader:
    """Reads the calls of a `torch.fx` graph one after another."""

    def __init__(self) -> None:
        self._values: dict[torch.fx.Node, str] = {}
        """Current graph value of each tensor; an in-place operation updates the entry of the tensor it writes to."""
        self._aliases: dict[torch.fx.Node, torch.fx.Node] = {}
        """Tensor that each result of an in-place operation is an alias of."""

    def _add_inputs(self, graph: Graph, inputs: Sequence[torch.fx.Node], names: Sequence[str]) -> None:
        """Add inputs with the model's names; `torch.fx` renames those that are Python builtins or keywords."""
        for node, name in zip(inputs, names, strict=True):
            self._values[node] = graph.fresh(name)
            graph.inputs = (*graph.inputs, replace(self._input(node), name=self._values[node]))

    def _input(self, node: torch.fx.Node) -> Input:
        value = node.meta["val"]
        return Input(node.name, self._shape(value), dtype_name(value.dtype))

    def _value(self, node: torch.fx.Node) -> str:
        return self._values[self._aliases.get(node, node)]

    def _shape(self, value: torch.Tensor) -> Shape:
        return tuple(self._dimension(size) for size in value.shape)

    def _dimension(self, size: Any) -> Dimension:
        if isinstance(size, int):
            return size
        raise CaptureError(
            "the model computes a size from a tensor's values, but a plan's sizes are fixed; mask elements instead"
        )

    def _call(self, graph: Graph, fx: torch.fx.Node) -> None:
        value = fx.meta.get("val")
        call, result = fx, None
        if fx.target is operator.getitem and isinstance(fx.args[0], torch.fx.Node):
            call, result = fx.args[0], fx.args[1]  # each result of a multi-output call becomes its own node
        target = call.target
        if isinstance(value, (torch.SymFloat, torch.SymBool, float, bool)):
            raise CaptureError(f"{target} reads a value of a tensor; a plan cannot depend on values")
        if isinstance(value, (tuple, list, type(None), torch.SymInt, int)):
            return  # sizes and multi-output calls: their users read them from the node's metadata
        if not isinstance(target, torch._ops.OpOverload) or not isinstance(value, torch.Tensor):
            name = getattr(target, "__name__", target)
            raise CaptureError(f"{name} is not a tensor operation; a plan runs only tensor operations")
        self._check_call(call, target)
        node = self._node(graph, fx, call, target, value)
        if result is not None:
            node = node.with_attributes(result=result, **({"call": call.name} if graph.typed else {}))
        recognized = match_captured(node, target, graph)
        if isinstance(recognized, str):  # a no-op: the name of its input
            name = recognized
        else:
            graph.append(recognized)
            name = recognized.name
        tensor = fx
        if mutates(call):
            changed = call.args[0]
            assert isinstance(changed, torch.fx.Node)
            tensor = self._aliases[fx] = self._aliases.get(changed, changed)
            graph.writes_inputs |= tensor.op == "placeholder" and tensor.name not in graph.constants
        self._values[tensor] = name

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

        bound = bound_arguments(target, call.args, call.kwargs)
        attributes = {"target": target.name(), "arguments": map_leaves(leaf, bound)}
        if graph.typed:
            attributes |= _layouts(target, tensors, value)
        return Node(
            graph.fresh(fx.name), ATEN, inputs, attributes, self._shape(value),
            dtype_name(_dtype(fx, target, bound, value)), self._source(call),
        )  # fmt: skip

    def _plain(self, argument: Any) -> Any:
        """Convert an argument that is not a value of the graph."""
        return argument

    def _check_call(self, call: torch.fx.Node, target: torch._ops.OpOverload) -> None:
        """Raise if the graph cannot represent a call."""

    def _source(self, call: torch.fx.Node) -> str:
        """Return the path of the module that makes a call."""
        return ""


def _is_image(value: torch.Tensor) -> bool:
    return value.dim() == 4 and value.is_floating_point()


def _is_planar(image: torch.Tensor) -> bool:
    """Return True for NCHW images that are not NHWC at the same time, as those of one channel or pixel are."""
    return image.is_contiguous() and not image.is_contiguous(memory_format=torch.channels_last)


def _layouts(
    target: torch._ops.OpOverload, tensors: Mapping[str, torch.Tensor], result: torch.Tensor
) -> dict[str, Any]:
    """Return the memory orders of a call's operands, where its operator may depend on them."""
    orders = {role: memory_order(tensor) for role, tensor in tensors.items()}
    others = {role: order for role, order in orders.items() if order is not None}
    attributes = {} if takes_any_layout(target) or not others else {ORDERS: others}
    images = [tensor for tensor in tensors.values() if _is_image(tensor)]
    if any(map(_is_planar, images)):
        return {READ: "nchw", **attributes}
    writes_planes = images and _is_image(result) and _is_planar(result)
    return {WRITTEN: "nchw", **attributes} if writes_planes else attributes


def note_input_writes(graph: Graph) -> None:
    if graph.writes_inputs:
        graph.notes.append("the model writes to its input; the engine leaves the caller's tensor unchanged")


class WeightCopies:
    """Copies of weights, so that training the model further does not change the engine. Shared weights stay shared."""

    def __init__(self, original: OriginalModel) -> None:
        self._original = original
        self._copies: dict[tuple[Any, ...], torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if not tensor.numel() or key not in self._copies:
            # Tensors of model copies are the engine's already; a global tensor, for example, is not.
            is_owned = self._original.owns(tensor)
            self._copies[key] = tensor.detach() if is_owned else tensor.detach().clone()
        return self._copies[key]


def _dtype(
    fx: torch.fx.Node, target: torch._ops.OpOverload, arguments: Mapping[str, Any], value: torch.Tensor
) -> torch.dtype:
    """Return the dtype of a result.

    On the CPU, a norm of 16-bit rows with fp32 weights returns mean and deviation in fp32. PyTorch's fake kernels
    report 16 bits, to which a plan would round them.
    """
    weight = arguments.get("weight")
    if target in _NORMS and fx.args[1:] in ((1,), (2,)) and isinstance(weight, torch.fx.Node):
        dtype: torch.dtype = weight.meta["val"].dtype
        return dtype
    return value.dtype


def mutates(node: torch.fx.Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and bool(node.args)
        and isinstance(node.args[0], torch.fx.Node)
    )


def reject_foreign_side_effects(graph: torch.fx.Graph) -> None:
    """Raise for operators of other libraries that do more than compute new tensors."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace != "aten":
            reason = side_effect(node.target)
            if reason is not None:
                raise CaptureError(f"{node.target.name()} {reason}; compile the parts of the model around it")


def has_aliased_writes(graph: torch.fx.Graph, results: Collection[torch.fx.Node] = ()) -> bool:
    """Return True if a write in place is seen through another tensor, or one call writes to several tensors.

    Such graphs have to be functionalized by PyTorch first, which takes seconds. A write to a view does not count if
    nothing reads the memory through another tensor later: `nn.Dropout(inplace=True)` after `flatten`, for example.
    `results` are the model's, for a graph without an output node.
    """
    memory: dict[torch.fx.Node, torch.fx.Node] = {}
    """The tensor that a view was made from."""
    written: dict[torch.fx.Node, torch.fx.Node] = {}
    """The tensor that a write in place returns."""
    sharing: dict[torch.fx.Node, set[torch.fx.Node]] = {}
    stale: set[torch.fx.Node] = set()
    """Tensors whose memory was written through another tensor."""

    def is_stale(node: torch.fx.Node) -> bool:
        return written.get(node, node) in stale

    for node in graph.nodes:
        writes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        if writes and not (mutates(node) and isinstance(node.meta.get("val"), torch.Tensor)):
            return True
        if stale and any(map(is_stale, node.all_input_nodes)):
            return True
        first = node.args[0] if node.args else None
        if not isinstance(first, torch.fx.Node):
            continue
        tensor = written.get(first, first)
        base = memory.get(tensor, tensor)
        if mutates(node):
            written[node] = tensor
            others = sharing.get(base, set()) - {tensor}
            is_foreign = base.op in ("placeholder", "get_attr")  # the caller's, or the model's own
            # Several results may share memory with anything: the schema of `broadcast_tensors` declares no views.
            is_several = not isinstance(base.meta.get("val"), torch.Tensor)
            if others and (is_foreign or is_several):
                return True
            stale |= others
        elif _is_view(node) or node.target is operator.getitem:
            memory[node] = base
            sharing.setdefault(base, {base}).add(node)
    return any(map(is_stale, results))


def _is_view(node: torch.fx.Node) -> bool:
    """Return True if the result shares memory with the first argument."""
    return isinstance(node.target, torch._ops.OpOverload) and any(
        result.alias_info is not None and not result.alias_info.is_write
        for result in node.target._schema.returns
    )
