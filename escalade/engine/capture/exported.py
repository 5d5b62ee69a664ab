"""Reads an exported program, node by node, into a graph."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from escalade.engine.capture.blocks import unwrapped
from escalade.engine.capture.conditions import Conditions, Sizes
from escalade.engine.capture.example_inputs import Given, Names
from escalade.engine.capture.model_copy import Original
from escalade.engine.capture.reader import (
    CaptureError,
    Copies,
    FxReader,
    dtype_name,
    note_changes,
    refuse_strange,
    tangled,
)
from escalade.engine.capture.state import changed_state, settle
from escalade.engine.graph.graph import Batch, Dimension, Graph, Input
from escalade.engine.graph.trees import flatten
from escalade.errors import EscaladeError


class NotBatched(EscaladeError):
    """Sizes depend on the batch in a way that a graph cannot hold."""


class Reader(FxReader):
    """An exported program, node by node."""

    def __init__(
        self,
        exported: torch.export.ExportedProgram,
        original: Original,
        structure: pytree.TreeSpec | None,
        given: Given,
        called: Names,
        sizes: Sizes = MappingProxyType({}),
    ) -> None:
        """`structure` is how the model returns the program's results, if the program does not know itself, `given` the
        example, and `called` what the model calls it; symbols that `sizes` names are numbers."""
        super().__init__()
        self._sizes = {symbol: sympy.Integer(size) for symbol, size in sizes.items()}
        self._symbol: Any = None
        self._nodes = unwrapped(exported.graph_module)
        refuse_strange(self._nodes)
        if tangled(self._nodes):
            exported = _untangled(exported)
            self._nodes = unwrapped(exported.graph_module)
        self._exported = exported
        self._original = original
        self._structure = structure
        self._given, self._called = given, called
        self._written: dict[str, str] = {}
        """What the model writes to its own tensors, by the names of the constants that these are."""

    def graph(self) -> Graph:
        exported = self._exported
        signature = exported.graph_signature
        graph = Graph((), {}, {}, ())
        tensors = {**exported.state_dict, **exported.constants}
        targets = {
            **signature.inputs_to_parameters, **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }  # fmt: skip
        copies = Copies(self._original)
        placeholders = self._nodes.find_nodes(op="placeholder")
        given = [node for node in placeholders if node.name not in targets]
        inputs = [node for node in given if isinstance(node.meta.get("val"), torch.Tensor)]
        self._take(graph, inputs, self._called.tensors)
        called: dict[str, str] = {}
        for node in placeholders:
            if node.name in targets:
                name = self._values[node] = graph.fresh(node.name)
                graph.constants[name] = copies.of(tensors[targets[node.name]])
                called[name] = targets[node.name]
        graph.called = called
        for node in self._nodes.nodes:
            if node.op == "call_function":
                self._call(graph, node)
            elif node.op == "get_attr":
                raise CaptureError(
                    f"the model has a branch or loop inside ({node.target}); a plan runs the same operations every time"
                )
            elif node.op == "output":
                self._outputs(graph, node)
        self._written |= {
            node.name: value
            for node, value in self._values.items()
            if node.name in targets and value != node.name
        }
        settle(graph, self._written, self._original)
        graph.arguments = self._given.structure
        graph.parameters = self._called.parameters
        if self._symbol is not None:
            graph.batches = Conditions(exported).batches(self._symbol, self._given.batch, self._sizes)
        note_changes(graph)
        return graph

    def _input(self, node: torch.fx.Node) -> Input:
        for size in node.meta["val"].shape:
            if self._symbol is None and isinstance(size, torch.SymInt):
                symbols = size.node.expr.free_symbols - self._sizes.keys()
                if len(symbols) == 1:
                    self._symbol = next(iter(symbols))
        return super()._input(node)

    def _dimension(self, size: Any) -> Dimension:
        if isinstance(size, int):
            return size
        expression = size.node.expr.xreplace(self._sizes)
        if expression.is_Integer:
            return int(expression)
        if any(symbol.name.startswith("u") for symbol in expression.free_symbols):
            return super()._dimension(size)
        if self._symbol is None or expression.free_symbols != {self._symbol}:
            raise NotBatched(f"a size of {expression}")
        times = expression / self._symbol
        if not times.is_Integer:
            raise NotBatched(f"a size of {expression}")
        return Batch(int(times))

    def _outputs(self, graph: Graph, node: torch.fx.Node) -> None:
        specs = self._exported.graph_signature.output_specs
        found, types = [], []
        returned: list[Any] = []
        for value, spec in zip(node.args[0], specs, strict=True):  # type: ignore[arg-type]
            if spec.kind is OutputKind.USER_INPUT_MUTATION:
                graph.changes_inputs = True
                continue
            if spec.kind is not OutputKind.USER_OUTPUT:
                held = {called: name for name, called in graph.called.items()}
                self._written[held[spec.target]] = self._value(value)
                continue
            returned.append(self._returned(value))
            if isinstance(returned[-1], torch.Tensor):
                found.append(self._value(value))
                types.append(dtype_name(returned[-1].dtype))
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
        names = [argument.name for argument in target._schema.arguments]
        bound = dict(zip(names, call.args, strict=False)) | dict(call.kwargs)
        # These change their statistics when they train, though their schemas do not say so.
        trains = bound.get("training") or bound.get("use_input_stats")
        statistics = bound.get("running_mean")
        if trains and isinstance(statistics, torch.fx.Node):
            raise CaptureError(changed_state(own.get(statistics.name, statistics.name)))

    def _source(self, call: torch.fx.Node) -> str:
        stack = call.meta.get("nn_module_stack") or {}
        names = [path for path, _ in stack.values()]
        return names[-1].removeprefix("L['self'].") if names else ""


def _untangled(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program without operations in place."""
    # PyTorch 2.9 compiles its guards on dictionaries of inputs into code that it cannot run. The engine has its own.
    if hasattr(exported, "_guards_code"):
        exported._guards_code = []
    try:
        return exported.run_decompositions({})
    except Exception as error:  # whatever PyTorch has against it
        said = str(error).strip().partition("\n")[0]
        raise CaptureError(
            "the model writes to tensors that share memory with others, and that cannot be untangled: "
            f"{type(error).__name__}: {said}"
        ) from error
