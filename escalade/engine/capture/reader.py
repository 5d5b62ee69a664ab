"""Reads an exported program, node by node, into a graph."""

from __future__ import annotations

import operator
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from escalade.engine.capture.blocks import unwrapped
from escalade.engine.capture.conditions import Conditions, Sizes
from escalade.engine.capture.separate import Original
from escalade.engine.graph.aten import strangeness
from escalade.engine.graph.graph import (
    ATEN,
    Batch,
    Dimension,
    Graph,
    Input,
    Node,
    Reference,
    Shape,
    map_leaves,
)
from escalade.engine.graph.trees import flatten
from escalade.engine.nodes.recognition import recognise_captured
from escalade.errors import EscaladeError, UnsupportedError


class CaptureError(UnsupportedError):
    """The model is not a graph of tensor operations."""


class NotBatched(EscaladeError):
    """Sizes depend on the batch in a way that a graph cannot hold."""


class FxReader:
    """The calls of a graph of `torch.fx`, one after another."""

    def __init__(self, sizes: Sizes = MappingProxyType({})) -> None:
        """Symbols that `sizes` names are numbers; of the others one is the batch."""
        self._sizes = {symbol: sympy.Integer(size) for symbol, size in sizes.items()}
        self._symbol: Any = None
        self._values: dict[torch.fx.Node, str] = {}
        """What each tensor holds by now; of those changed in place, the tensor that they all are."""
        self._same: dict[torch.fx.Node, torch.fx.Node] = {}
        """The results of operations in place, and the tensors that they are."""

    def _input(self, node: torch.fx.Node) -> Input:
        value = node.meta["val"]
        for size in value.shape:
            if self._symbol is None and isinstance(size, torch.SymInt):
                symbols = size.node.expr.free_symbols - self._sizes.keys()
                if len(symbols) == 1:
                    self._symbol = next(iter(symbols))
        return Input(node.name, self._shape(value), _dtype_name(value.dtype))

    def _value(self, node: torch.fx.Node) -> str:
        return self._values[self._same.get(node, node)]

    def _shape(self, value: torch.Tensor) -> Shape:
        return tuple(self._dimension(size) for size in value.shape)

    def _dimension(self, size: Any) -> Dimension:
        """A number, or so many for each item of the batch."""
        if isinstance(size, int):
            return size
        expression = size.node.expr.xreplace(self._sizes)
        if expression.is_Integer:
            return int(expression)
        if any(symbol.name.startswith("u") for symbol in expression.free_symbols):
            raise CaptureError(
                "the model takes a size out of a tensor's values; a plan's sizes are fixed beforehand"
            )
        if self._symbol is None or expression.free_symbols != {self._symbol}:
            raise NotBatched(f"a size of {expression}")
        times = expression / self._symbol
        if not times.is_Integer:
            raise NotBatched(f"a size of {expression}")
        return Batch(int(times))

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
        if _mutates(call):
            changed = call.args[0]
            assert isinstance(changed, torch.fx.Node)
            tensor = self._same[fx] = self._same.get(changed, changed)
            graph.changes_inputs |= tensor.op == "placeholder"
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

        def leaf(argument: Any) -> Any:
            if not isinstance(argument, torch.fx.Node):
                return argument
            meta = argument.meta["val"]
            if not isinstance(meta, torch.Tensor):
                return self._dimension(meta)
            role = f"in{len(inputs)}"
            inputs[role] = self._value(argument)
            return Reference(role)

        names = [argument.name for argument in target._schema.arguments]
        bound = dict(zip(names, call.args, strict=False)) | dict(call.kwargs)
        return Node(
            graph.fresh(fx.name), ATEN, inputs,
            {"target": target.name(), "arguments": map_leaves(leaf, bound)},
            self._shape(value), _dtype_name(value.dtype), self._source(call),
        )  # fmt: skip

    def _look_at(self, call: torch.fx.Node, target: torch._ops.OpOverload) -> None:
        """Refuses a call that the graph cannot hold."""

    def _source(self, call: torch.fx.Node) -> str:
        """The module that an operation belongs to."""
        return ""


class Reader(FxReader):
    """An exported program, node by node."""

    def __init__(
        self,
        exported: torch.export.ExportedProgram,
        original: Original,
        structure: pytree.TreeSpec | None,
        batch: int,
        sizes: Sizes = MappingProxyType({}),
    ) -> None:
        """`structure` is how the model returns the program's results, if the program does not know itself, `batch` the
        example's; symbols that `sizes` names are numbers."""
        super().__init__(sizes)
        self._nodes = unwrapped(exported.graph_module)
        _refuse_strange(self._nodes)
        if _tangled(self._nodes):
            exported = exported.run_decompositions({})
            self._nodes = unwrapped(exported.graph_module)
        self._exported = exported
        self._original = original
        self._structure = structure
        self._batch = batch

    def graph(self) -> Graph:
        exported = self._exported
        signature = exported.graph_signature
        graph = Graph((), {}, {}, ())
        tensors = {**exported.state_dict, **exported.constants}
        targets = {
            **signature.inputs_to_parameters, **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }  # fmt: skip
        graph.called = targets
        copies = _Copies(self._original)
        inputs: list[Input] = []
        given: list[Any] = []
        """What the caller gives: tensors, and values that are the same at every call."""
        for node in self._nodes.nodes:
            if node.op == "placeholder":
                if node.name in targets:
                    graph.constants[node.name] = copies.of(tensors[targets[node.name]])
                    self._values[node] = node.name
                    continue
                value = node.meta.get("val")
                given.append(value)
                if isinstance(value, torch.Tensor):
                    inputs.append(self._input(node))
                    self._values[node] = node.name
                    graph.inputs = tuple(inputs)
            elif node.op == "call_function":
                self._call(graph, node)
            elif node.op == "get_attr":
                raise CaptureError(
                    f"the model has a branch or loop inside ({node.target}); a plan runs the same operations every time"
                )
            elif node.op == "output":
                self._outputs(graph, node)
        _, graph.arguments = flatten(pytree.tree_unflatten(given, exported.call_spec.in_spec))
        if self._symbol is not None:
            graph.batches = Conditions(exported).batches(self._symbol, self._batch, self._sizes)
        if graph.changes_inputs:
            graph.notes.append(
                "the model writes to its input; the engine leaves the caller's tensor as it is"
            )
        return graph

    def _outputs(self, graph: Graph, node: torch.fx.Node) -> None:
        specs = self._exported.graph_signature.output_specs
        found, types = [], []
        returned: list[Any] = []
        for value, spec in zip(node.args[0], specs, strict=True):  # type: ignore[arg-type]
            if spec.kind is OutputKind.USER_INPUT_MUTATION:
                graph.changes_inputs = True
                continue
            if spec.kind is not OutputKind.USER_OUTPUT:
                raise CaptureError(_state(spec.target))
            returned.append(self._returned(value))
            if isinstance(returned[-1], torch.Tensor):
                found.append(self._value(value))
                types.append(_dtype_name(returned[-1].dtype))
        graph.outputs, graph.output_types = tuple(found), tuple(types)
        spec = self._exported.call_spec.out_spec
        graph.structure = self._structure or flatten(pytree.tree_unflatten(returned, spec))[1]

    def _returned(self, value: Any) -> Any:
        """What the model returns: a tensor, or a value that is the same at every call."""
        found = value.meta["val"] if isinstance(value, torch.fx.Node) else value
        if not isinstance(found, torch.SymInt):
            return found
        size = self._dimension(found)
        if isinstance(size, Batch):
            raise NotBatched("the batch is a result")
        return size

    def _look_at(self, call: torch.fx.Node, target: torch._ops.OpOverload) -> None:
        signature = self._exported.graph_signature
        own = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        first = call.args[0] if call.args else None
        if _mutates(call) and isinstance(first, torch.fx.Node) and first.name in own:
            raise CaptureError(_state(own[first.name]))
        names = [argument.name for argument in target._schema.arguments]
        bound = dict(zip(names, call.args, strict=False)) | dict(call.kwargs)
        # These change their statistics when they train, though their schemas do not say so.
        trains = bound.get("training") or bound.get("use_input_stats")
        statistics = bound.get("running_mean")
        if trains and isinstance(statistics, torch.fx.Node):
            raise CaptureError(_state(own.get(statistics.name, statistics.name)))

    def _source(self, call: torch.fx.Node) -> str:
        stack = call.meta.get("nn_module_stack") or {}
        names = [path for path, _ in stack.values()]
        return names[-1].removeprefix("L['self'].") if names else ""


def _state(name: str | None) -> str:
    return f"the model changes its own {name} when it runs; compile takes models without state"


class _Copies:
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


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mutates(node: torch.fx.Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and bool(node.args)
        and isinstance(node.args[0], torch.fx.Node)
    )


def _refuse_strange(graph: torch.fx.Graph) -> None:
    """Refuses calls of other libraries' operators that do more than to compute new tensors."""
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace != "aten":
            reason = strangeness(node.target)
            if reason is not None:
                raise CaptureError(f"{node.target.name()} {reason}; compile the parts of the model around it")


def _tangled(graph: torch.fx.Graph) -> bool:
    """Whether a value is changed in place of which there is a view by then, or several are in one call: PyTorch has to
    untangle that."""
    owner: dict[torch.fx.Node, torch.fx.Node] = {}
    viewed: set[torch.fx.Node] = set()
    for node in graph.nodes:
        first = node.args[0] if node.args else None
        writes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        if writes and not (_mutates(node) and isinstance(node.meta.get("val"), torch.Tensor)):
            return True
        if not isinstance(first, torch.fx.Node):
            continue
        memory = owner.get(first, first)
        if _mutates(node):
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
