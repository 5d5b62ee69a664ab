"""From a PyTorch module to a graph, through `torch.export`."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from escalade.engine.graph import ATEN, Batch, Dimension, Graph, Input, Node, Reference, Shape, map_leaves
from escalade.engine.translate import translate
from escalade.errors import EscaladeError, UnsupportedError


class CaptureError(UnsupportedError):
    """The model is not a graph of tensor operations."""


def capture(model: torch.nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any] | None = None) -> Graph:
    """The model's operations on inputs like these, for any batch size if the model allows it.

    The model is captured in evaluation mode, whatever mode it is in; it is not changed.
    """
    keywords = dict(keywords or {})
    _check_inputs(arguments, keywords)
    was_training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _graph(model, tuple(arguments), keywords)
    finally:
        for module in was_training:
            module.training = True


def _graph(model: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Graph:
    exported = _export_batched(model, arguments, keywords)
    if exported is not None:
        try:
            return _Reader(exported).graph()
        except _NotBatched:
            pass
    try:
        exported = torch.export.export(model, arguments, keywords, strict=False)
    except Exception as error:
        raise CaptureError(_explain(model, error)) from error
    graph = _Reader(exported).graph()
    graph.notes.append("the model works for this batch size only: its sizes depend on the batch in other ways than by a factor")
    return graph


def _check_inputs(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    leaves = pytree.tree_leaves((tuple(arguments), dict(keywords)))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not tensors:
        raise UnsupportedError("compile needs example inputs: tensors like those the model will be called with")
    for tensor in tensors:
        if tensor.dtype.is_complex or tensor.is_sparse or tensor.is_quantized:
            raise UnsupportedError(
                f"an input of {tensor.dtype} ({tensor.layout}): compile takes dense tensors of real numbers"
            )


def _export_batched(
    model: torch.nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]
) -> torch.export.ExportedProgram | None:
    """The program with a free batch size; None if the model does not allow it."""
    leaves = [leaf for leaf in pytree.tree_leaves((arguments, keywords)) if isinstance(leaf, torch.Tensor)]
    sizes = {leaf.shape[0] for leaf in leaves if leaf.dim() > 1}
    if len(sizes) != 1 or 0 in sizes:
        return None

    def widened(leaf: Any) -> Any:
        """A batch of one would be taken for a constant."""
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.shape[0] == 1:
            return torch.cat([leaf, leaf])
        return leaf

    def dynamic(leaf: Any) -> Any:
        return {0: torch.export.Dim.AUTO} if isinstance(leaf, torch.Tensor) and leaf.dim() > 1 else None

    wide = pytree.tree_map(widened, (arguments, keywords))
    shapes = _named_shapes(model, pytree.tree_map(dynamic, wide))
    try:
        return torch.export.export(model, wide[0], wide[1], dynamic_shapes=shapes, strict=False)
    except Exception:  # whatever it is, the attempt with fixed sizes will say it
        return None


def _named_shapes(model: torch.nn.Module, shapes: tuple[Any, Any]) -> Any:
    positional, named = shapes
    if not named:
        return positional
    import inspect

    names = list(inspect.signature(model.forward).parameters)
    return dict(zip(names, positional, strict=False)) | named


def _explain(model: torch.nn.Module, error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    name = type(model).__name__
    kind = type(error).__name__
    if "data-dependent" in str(error).lower() or "GuardOnDataDependent" in kind:
        return (
            f"{name} decides by the values of its tensors which operations to run, and a plan is fixed beforehand. "
            f"Take the decision out of the model, or compile the parts around it. ({text[0]})"
        )
    return f"{name} cannot be captured as a graph of tensor operations: {kind}: {text[0]}"


class _Reader:
    """An exported program, node by node."""

    def __init__(self, exported: torch.export.ExportedProgram) -> None:
        if _tangled(exported.graph):
            exported = exported.run_decompositions({})
        self._exported = exported
        self._symbol: Any = None
        self._values: dict[torch.fx.Node, str] = {}

    def graph(self) -> Graph:
        exported = self._exported
        signature = exported.graph_signature
        graph = Graph((), {}, {}, ())
        tensors = {**exported.state_dict, **exported.constants}
        targets = {
            **signature.inputs_to_parameters, **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }  # fmt: skip
        inputs: list[Input] = []
        for node in exported.graph.nodes:
            if node.op == "placeholder":
                if node.name in targets:
                    graph.constants[node.name] = tensors[targets[node.name]].detach()
                    self._values[node] = node.name
                else:
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
                graph.outputs = self._outputs(node)
        graph.structure = pytree.treespec_dumps(exported.call_spec.out_spec)
        graph.arguments = pytree.treespec_dumps(exported.call_spec.in_spec)
        return graph

    def _input(self, node: torch.fx.Node) -> Input:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            raise CaptureError(
                f"input {node.name!r} is {type(value).__name__}; a compiled model takes tensors only. Fix other "
                "arguments with functools.partial or a wrapper module"
            )
        return Input(node.name, self._shape(value), _dtype_name(value.dtype))

    def _outputs(self, node: torch.fx.Node) -> tuple[str, ...]:
        found = []
        for value in node.args[0]:  # type: ignore[union-attr]
            if not isinstance(value, torch.fx.Node):
                raise CaptureError(f"the model returns {value!r}; a compiled model returns tensors only")
            found.append(self._values[value])
        return tuple(found)

    def _shape(self, value: torch.Tensor) -> Shape:
        return tuple(self._dimension(size) for size in value.shape)

    def _dimension(self, size: Any) -> Dimension:
        """A number, or so many for each item of the batch."""
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if self._symbol is None:
            symbols = expression.free_symbols
            if len(symbols) != 1:
                raise CaptureError(f"a size of {expression}: compile takes one free size, the batch")
            self._symbol = next(iter(symbols))
        times = expression / self._symbol
        if not times.is_Integer:
            raise _NotBatched(f"a size of {expression}")
        return Batch(int(times))

    def _call(self, graph: Graph, fx: torch.fx.Node) -> None:
        value = fx.meta.get("val")
        call, result = fx, None
        if fx.target is operator.getitem and isinstance(fx.args[0], torch.fx.Node):
            call, result = fx.args[0], fx.args[1]  # one of several results: the operation runs for each
        target = call.target
        if isinstance(value, (tuple, list, type(None), torch.SymInt, int, float, bool)):
            if isinstance(value, (torch.SymFloat, torch.SymBool, float, bool)):
                raise CaptureError(f"{target} takes a value out of a tensor; a plan cannot depend on values")
            return  # sizes and results in several parts: whoever uses them reads them from their node
        if not isinstance(target, torch._ops.OpOverload) or not isinstance(value, torch.Tensor):
            raise CaptureError(f"{target} is no tensor operation; a plan runs the same operations every time")
        self._refuse_state(call)
        node = self._node(graph, fx, call, target, value)
        if result is not None:
            node = node.with_attributes(result=result)
        known = translate(node, target, graph)
        if isinstance(known, str):
            self._values[fx] = known  # it changes nothing
            return
        graph.append(known)
        self._values[fx] = known.name
        if _mutates(call):
            changed = call.args[0]
            assert isinstance(changed, torch.fx.Node)
            self._values[changed] = known.name  # from here on that tensor is this one

    def _node(
        self, graph: Graph, fx: torch.fx.Node, call: torch.fx.Node, target: torch._ops.OpOverload, value: torch.Tensor
    ) -> Node:
        inputs: dict[str, str] = {}

        def leaf(argument: Any) -> Any:
            if not isinstance(argument, torch.fx.Node):
                return argument
            meta = argument.meta["val"]
            if not isinstance(meta, torch.Tensor):
                return self._dimension(meta)
            role = f"in{len(inputs)}"
            inputs[role] = self._values[argument]
            return Reference(role)

        names = [argument.name for argument in target._schema.arguments]
        bound = dict(zip(names, call.args, strict=False)) | dict(call.kwargs)
        return Node(
            graph.fresh(fx.name), ATEN, inputs,
            {"target": target.name(), "arguments": map_leaves(leaf, bound)},
            self._shape(value), _dtype_name(value.dtype), _source(call),
        )  # fmt: skip

    def _refuse_state(self, call: torch.fx.Node) -> None:
        signature = self._exported.graph_signature
        first = call.args[0] if call.args else None
        if _mutates(call) and isinstance(first, torch.fx.Node) and first.name in signature.inputs_to_buffers:
            raise CaptureError(
                f"the model changes its own buffer {signature.inputs_to_buffers[first.name]} when it runs; compile "
                "takes models without state"
            )


class _NotBatched(EscaladeError):
    """Sizes depend on the batch in a way that a graph cannot hold."""


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mutates(node: torch.fx.Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and bool(node.args)
        and isinstance(node.args[0], torch.fx.Node)
    )


def _tangled(graph: torch.fx.Graph) -> bool:
    """Whether a value that is changed in place shares memory with a view: PyTorch has to untangle that."""
    changed = {node.args[0] for node in graph.nodes if _mutates(node)}
    return any(_is_view(node) and (node in changed or node.args[0] in changed) for node in graph.nodes)


def _is_view(node: torch.fx.Node) -> bool:
    """Whether it shares memory with its first argument."""
    return isinstance(node.target, torch._ops.OpOverload) and any(
        result.alias_info is not None and not result.alias_info.is_write for result in node.target._schema.returns
    )


def _source(node: torch.fx.Node) -> str:
    """The module that an operation belongs to."""
    stack = node.meta.get("nn_module_stack") or {}
    names = [path for path, _ in stack.values()]
    return names[-1].removeprefix("L['self'].") if names else ""
