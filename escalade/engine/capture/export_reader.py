"""Conversion of a `torch.export` program into a graph: its mode blocks, its symbolic sizes and the guards on them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import sympy
import torch
import torch.fx
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from escalade.engine.capture.example_inputs import ExampleInputs, InputNames
from escalade.engine.capture.model_copy import OriginalModel
from escalade.engine.capture.reader import (
    CaptureError,
    FxReader,
    WeightCopies,
    has_aliased_writes,
    note_input_writes,
    reject_foreign_side_effects,
)
from escalade.engine.capture.weights import check_weight_writes, state_change_message
from escalade.engine.graph.aten import bound_arguments, updates_statistics
from escalade.engine.graph.graph import Batch, Dimension, Graph, Input, dtype_name
from escalade.engine.graph.trees import flatten
from escalade.errors import EscaladeError

Sizes = Mapping[sympy.Symbol, int]
_EXPORT_MINIMUM = 2  # torch.export specializes sizes 0 and 1, so every symbol's range starts here


class ShapeGuards:
    """Ranges of a program's symbols, and the guards on them that held for the example."""

    def __init__(self, exported: torch.export.ExportedProgram) -> None:
        self._ranges: dict[Any, Any] = {}
        self._guards: list[Any] = []
        modes = (getattr(node.meta.get("val"), "fake_mode", None) for node in exported.graph.nodes)
        for env in {mode.shape_env for mode in modes if mode is not None and mode.shape_env is not None}:
            self._ranges |= env.var_to_range
            self._guards += [env.replace(guard.expr) for guard in env.guards]
        self._ranges |= exported.range_constraints

    def hold_for(self, sizes: Sizes) -> bool:
        """Return True if the program is valid with these sizes for its symbols."""
        in_range = all(size in self._range(symbol) for symbol, size in sizes.items())
        return in_range and all(guard == sympy.true for guard in self._substituted(sizes))

    def batch_range(self, symbol: sympy.Symbol, example: int, sizes: Sizes) -> tuple[int, int | None]:
        """Return the smallest and the largest valid batch size (None: unbounded), given sizes for the other symbols."""
        known = self._range(symbol)
        guards = [guard for guard in self._substituted(sizes) if guard != sympy.true]
        spans = [(known.lower, known.upper), (example, known.upper), (known.lower, example)]
        least, most = next((span for span in spans if _hold_on(guards, symbol, span)), (example, example))
        if least == _EXPORT_MINIMUM and _hold_on(guards, symbol, (1, 1)):
            least = 1
        return int(least), None if most == int_oo else int(most)

    def _range(self, symbol: sympy.Symbol) -> Any:
        return self._ranges.get(symbol, ValueRanges(_EXPORT_MINIMUM, int_oo))

    def _substituted(self, sizes: Sizes) -> list[Any]:
        numbers = {symbol: sympy.Integer(size) for symbol, size in sizes.items()}
        return [guard.xreplace(numbers) for guard in self._guards]


def _hold_on(guards: list[Any], symbol: sympy.Symbol, span: tuple[Any, Any]) -> bool:
    """Return True if all guards provably hold on the whole span; undecidable guards count as false."""
    return all(bound_sympy(guard, {symbol: ValueRanges(*span)}).lower == sympy.true for guard in guards)


_MODE_OPERATORS = ("wrap_with_autocast", "wrap_with_set_grad_enabled")


def inline_mode_blocks(module: torch.fx.GraphModule) -> torch.fx.Graph:
    """Return the module's graph with all blocks under a mode, such as autocast, inlined, including nested ones.

    The mode is dropped: a plan has its own precision and no gradients.
    """
    graph = torch.fx.Graph()
    copied: dict[torch.fx.Node, Any] = {}
    graph.output(_copy(module, copied, graph))
    return graph


def _copy(module: torch.fx.GraphModule, copied: dict[torch.fx.Node, Any], into: torch.fx.Graph) -> Any:
    """Copy all nodes that are not in `copied` yet, and return the module's result."""
    for node in module.graph.nodes:
        if node in copied:
            continue
        if node.op == "output":
            return _map(node.args[0], copied)
        if _is_block(node):
            inner = next(argument for argument in node.args if _is_module(argument))
            arguments = node.args[node.args.index(inner) + 1 :]
            block = getattr(module, inner.target)
            placeholders = [inner_node for inner_node in block.graph.nodes if inner_node.op == "placeholder"]
            bound = dict(zip(placeholders, (_map(argument, copied) for argument in arguments), strict=True))
            copied[node] = _copy(block, bound, into)
        elif node.target is operator.getitem and isinstance(copied.get(node.args[0]), tuple | list):
            copied[node] = copied[node.args[0]][node.args[1]]
        elif not (_is_module(node) and all(map(_is_block, node.users))):
            copied[node] = into.node_copy(node, lambda old: copied[old])
    return None


def _map(argument: Any, copied: Mapping[torch.fx.Node, Any]) -> Any:
    return torch.fx.map_arg(argument, lambda node: copied[node])


def _is_block(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in _MODE_OPERATORS


def _is_module(argument: Any) -> bool:
    return isinstance(argument, torch.fx.Node) and argument.op == "get_attr"


class BatchNotSymbolic(EscaladeError):
    """A size is not a multiple of the batch size, so a graph cannot represent it."""


class ExportReader(FxReader):
    """Reads an exported program node by node."""

    def __init__(
        self,
        exported: torch.export.ExportedProgram,
        original: OriginalModel,
        structure: pytree.TreeSpec | None,
        example: ExampleInputs,
        input_names: InputNames,
        sizes: Sizes = MappingProxyType({}),
    ) -> None:
        """`structure` overrides the program's own result structure; symbols in `sizes` are replaced by numbers."""
        super().__init__()
        self._sizes = {symbol: sympy.Integer(size) for symbol, size in sizes.items()}
        self._batch_symbol: Any = None
        self._nodes = inline_mode_blocks(exported.graph_module)
        reject_foreign_side_effects(self._nodes)
        if has_aliased_writes(self._nodes):
            exported = _functionalized(exported)
            self._nodes = inline_mode_blocks(exported.graph_module)
        self._exported = exported
        self._original = original
        self._structure = structure
        self._example, self._input_names = example, input_names
        self._written: dict[str, str] = {}
        """Final value of each constant that the model writes to."""

    def graph(self) -> Graph:
        exported = self._exported
        signature = exported.graph_signature
        graph = Graph((), {}, {}, ())
        tensors = {**exported.state_dict, **exported.constants}
        targets = {
            **signature.inputs_to_parameters, **signature.inputs_to_buffers,
            **signature.inputs_to_lifted_tensor_constants,
        }  # fmt: skip
        copies = WeightCopies(self._original)
        placeholders = self._nodes.find_nodes(op="placeholder")
        inputs = [node for node in placeholders if node.name not in targets]
        inputs = [node for node in inputs if isinstance(node.meta.get("val"), torch.Tensor)]
        self._add_inputs(graph, inputs, self._input_names.tensors)
        weight_names: dict[str, str] = {}
        for node in placeholders:
            if node.name in targets:
                name = self._values[node] = graph.fresh(node.name)
                graph.constants[name] = copies.of(tensors[targets[node.name]])
                weight_names[name] = targets[node.name]
        graph.weight_names = weight_names
        graph.fixed_weights = frozenset(self._original.read_weights)
        for node in self._nodes.nodes:
            if node.op == "call_function":
                self._call(graph, node)
            elif node.op == "get_attr":
                raise CaptureError(
                    f"the model contains a control-flow operator ({node.target}); a plan runs the same operations at "
                    "every call: compile the parts of the model around it"
                )
            elif node.op == "output":
                self._outputs(graph, node)
        self._written |= {
            node.name: value
            for node, value in self._values.items()
            if node.name in targets and value != node.name
        }
        check_weight_writes(graph, self._written, self._original)
        graph.arguments = self._example.structure
        graph.parameters = self._input_names.parameters
        if self._batch_symbol is not None:
            guards = ShapeGuards(exported)
            graph.batches = guards.batch_range(self._batch_symbol, self._example.batch, self._sizes)
        note_input_writes(graph)
        return graph

    def _input(self, node: torch.fx.Node) -> Input:
        for size in node.meta["val"].shape:
            if self._batch_symbol is None and isinstance(size, torch.SymInt):
                symbols = size.node.expr.free_symbols - self._sizes.keys()
                if len(symbols) == 1:
                    self._batch_symbol = next(iter(symbols))
        return super()._input(node)

    def _dimension(self, size: Any) -> Dimension:
        if isinstance(size, int):
            return size
        expression = size.node.expr.xreplace(self._sizes)
        if expression.is_Integer:
            return int(expression)
        if any(symbol.name.startswith("u") for symbol in expression.free_symbols):  # unbacked: data-dependent
            return super()._dimension(size)
        if self._batch_symbol is None or expression.free_symbols != {self._batch_symbol}:
            raise BatchNotSymbolic(f"a size of {expression}")
        times = expression / self._batch_symbol  # a graph's sizes are multiples of the batch
        if not times.is_Integer:
            raise BatchNotSymbolic(f"a size of {expression}")
        return Batch(int(times))

    def _outputs(self, graph: Graph, node: torch.fx.Node) -> None:
        specs = self._exported.graph_signature.output_specs
        outputs, types = [], []
        returned: list[Any] = []
        for value, spec in zip(node.args[0], specs, strict=True):  # type: ignore[arg-type]
            if spec.kind is OutputKind.USER_INPUT_MUTATION:
                graph.writes_inputs = True
                continue
            if spec.kind is not OutputKind.USER_OUTPUT:
                constants = {target: name for name, target in graph.weight_names.items()}
                self._written[constants[spec.target]] = self._value(value)
                continue
            returned.append(self._returned(value))
            if isinstance(returned[-1], torch.Tensor):
                outputs.append(self._value(value))
                types.append(dtype_name(returned[-1].dtype))
        graph.outputs, graph.output_types = tuple(outputs), tuple(types)
        spec = self._exported.call_spec.out_spec
        graph.structure = self._structure or flatten(pytree.tree_unflatten(returned, spec))[1]

    def _returned(self, value: Any) -> Any:
        """Return a result of the model: a tensor, or a value that is constant over calls."""
        found = value.meta["val"] if isinstance(value, torch.fx.Node) else value
        if not isinstance(found, torch.SymInt):
            return found
        size = self._dimension(found)
        if isinstance(size, Batch):
            raise BatchNotSymbolic("the model returns the batch size")
        return size

    def _check_call(self, call: torch.fx.Node, target: torch._ops.OpOverload) -> None:
        signature = self._exported.graph_signature
        own = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        bound = bound_arguments(target, call.args, call.kwargs)
        statistics = bound.get("running_mean")
        if updates_statistics(bound) and isinstance(statistics, torch.fx.Node):
            raise CaptureError(state_change_message(own.get(statistics.name, statistics.name)))

    def _source(self, call: torch.fx.Node) -> str:
        stack = call.meta.get("nn_module_stack") or {}
        names = [path for path, _ in stack.values()]
        return names[-1].removeprefix("L['self'].") if names else ""


def _functionalized(exported: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """Rewrite the program without in-place operations."""
    # PyTorch 2.9 generates guard code for dict inputs that does not run. The engine has its own guards.
    if hasattr(exported, "_guards_code"):
        exported._guards_code = []
    try:
        return exported.run_decompositions({})
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise CaptureError(
            "the model writes to tensors that share memory with others, and PyTorch cannot functionalize that: "
            f"{type(error).__name__}: {reason}"
        ) from error
