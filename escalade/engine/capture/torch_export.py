"""Capture through `torch.export`, with or without symbolic sizes.

`torch.export` takes seconds to load, so it is only used for models that `trace` cannot capture.
"""

from __future__ import annotations

import inspect
import pathlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from escalade.engine.capture.example_inputs import ExampleInputs, InputNames, has_batch_dimension
from escalade.engine.capture.export_context import export_context, quiet_in_this_thread
from escalade.engine.capture.export_reader import BatchNotSymbolic, ExportReader, ShapeGuards, Sizes
from escalade.engine.capture.model_copy import OriginalModel
from escalade.engine.capture.python_state import StateWatch
from escalade.engine.capture.reader import CaptureError
from escalade.engine.capture.weights import WeightValues, answer_weight_queries
from escalade.engine.graph import trees
from escalade.engine.graph.graph import Batch, Graph, fixed_shape
from escalade.engine.graph.trees import TreeError, flatten, open_dataclasses
from escalade.errors import UnsupportedError

# Batch size to compare with a batch of one: it is unlikely that two of a model's own sizes have this ratio.
_TRIAL_BATCH = 7


class _ExportAdapter:
    """Adapts a model copy to `torch.export`, which supports fewer kinds of arguments and results.

    The copy may read weight values, takes dataclasses as dicts, and returns a flat tuple of tensors; `structure` is
    that of the original result. GraphModules need none of this, and `torch.export` runs them without hooks.
    """

    def __init__(self, original: OriginalModel, model: torch.nn.Module, example: ExampleInputs) -> None:
        self.structure: pytree.TreeSpec | None = None
        self.input_names = example.names(model)
        self._example = example
        if not isinstance(model, torch.fx.GraphModule):
            answer_weight_queries(model, original.read_weights)
            model.register_forward_pre_hook(self._rebuild_arguments, prepend=True, with_kwargs=True)
            model.register_forward_hook(self._flatten_results)  # after the model's own hooks
            self._watch = StateWatch(original, model, exported=True)

    def _rebuild_arguments(self, model: torch.nn.Module, arguments: Any, keywords: Any) -> tuple[Any, Any]:
        leaves = pytree.tree_leaves((arguments, keywords))
        return self._example.call([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])

    def _flatten_results(
        self, model: torch.nn.Module, arguments: Any, results: Any
    ) -> tuple[torch.Tensor, ...]:
        self._watch.record_change()  # before PyTorch restores attributes
        tensors, self.structure = flatten(results)
        return tuple(tensors)


def fixed_graph(original: OriginalModel, example: ExampleInputs) -> Graph:
    """Capture the model for inputs of exactly these sizes."""
    model = original.copy()
    adapter = _ExportAdapter(original, model, example)
    arguments, keywords = open_dataclasses(example.call())
    try:
        with export_context():
            exported = torch.export.export(model, arguments, keywords, strict=False)
    except TreeError as error:
        raise CaptureError(f"{type(model).__name__} returns {error}") from error
    except Exception as error:
        raise CaptureError(_describe_failure(model, error)) from error
    graph = ExportReader(exported, original, adapter.structure, example, adapter.input_names).graph()
    graph.notes.append(
        "this graph is for one batch size only: the model's sizes are not multiples of the batch"
    )
    return graph


def batched_graph(original: OriginalModel, example: ExampleInputs) -> Graph | None:
    """Capture the model with a symbolic batch size; None if it does not allow that."""
    exported = export_symbolic(original, example, lambda dimension: dimension == 0)
    return None if exported is None else read_batched(exported, original, example)


class SymbolicProgram:
    """A program with symbols for all sizes, and its guards on them."""

    def __init__(self, exported: ExportedModel) -> None:
        self._exported = exported
        program = exported.program
        self._guards = ShapeGuards(program)
        placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        names = program.graph_signature.user_inputs
        values = [placeholders[name].meta["val"] for name in names if name in placeholders]
        self._shapes = [tuple(value.shape) for value in values if isinstance(value, torch.Tensor)]

    def graph(self, original: OriginalModel, example: ExampleInputs) -> Graph | None:
        """Return the graph for inputs of these sizes and any batch; None if the program's guards exclude them."""
        batches: set[sympy.Symbol] = set()
        sizes: dict[sympy.Symbol, int] = {}
        for shape, tensor in zip(self._shapes, example.tensors, strict=True):
            if len(shape) != tensor.dim():
                return None
            for dimension, (size, number) in enumerate(zip(shape, tensor.shape, strict=True)):
                symbol = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
                is_batch = symbol.is_Symbol and dimension == 0
                if is_batch:
                    batches.add(symbol)
                actual = example.batch if is_batch else number
                if (sizes.setdefault(symbol, actual) if symbol.is_Symbol else symbol) != actual:
                    return None
        if len(batches) != 1 or not self._guards.hold_for(sizes):
            return None
        numbers = {symbol: size for symbol, size in sizes.items() if symbol not in batches}
        try:
            return read_batched(self._exported, original, example, numbers)
        except UnsupportedError:  # it may still be capturable with fixed sizes
            return None


def read_batched(
    exported: ExportedModel,
    original: OriginalModel,
    example: ExampleInputs,
    sizes: Sizes = MappingProxyType({}),
) -> Graph | None:
    """Read a program as a graph for a range of batch sizes; other symbols become the numbers in `sizes`."""
    try:
        reader = ExportReader(
            exported.program, original, exported.structure, example, exported.input_names, sizes
        )
        graph = reader.graph()
    except BatchNotSymbolic:
        return None
    if not graph.is_batched:
        return None
    if graph.batches[0] == 1 and not _is_valid_for_one(original, example, graph):
        graph.batches = (2, graph.batches[1])
    batch = next(
        leaf.shape[0] // size.times
        for leaf, entry in zip(example.tensors, graph.inputs, strict=True)
        for size in entry.shape[:1]
        if isinstance(size, Batch)
    )
    least, most = graph.batches
    return graph if least <= batch and (most is None or batch <= most) else None


def _is_valid_for_one(original: OriginalModel, example: ExampleInputs, graph: Graph) -> bool:
    """Return True if the graph also holds for a batch of one, which `squeeze()`, for example, removes.

    Export assumes that symbolic sizes are at least 2. So model copies run on fake tensors with a batch of one and with
    a larger one, and their calls are compared.
    """
    most = graph.batches[1]
    count = _TRIAL_BATCH if most is None else min(most, _TRIAL_BATCH)
    try:
        one, several = (_run_trial(original, example, batch) for batch in (1, count))
    except Exception:  # it does not run on fake tensors, so nothing contradicts the graph
        return True
    expected = [fixed_shape(graph.shape_of(name), 1) for name in graph.outputs]
    return one.shapes == expected and one.scales_to(several, count)


@dataclass(frozen=True)
class _Trial:
    """Record of a model run on fake tensors."""

    shapes: list[tuple[int, ...]]
    calls: list[tuple[Any, ...]]
    """PyTorch functions that it called, each with its non-tensor arguments."""

    def scales_to(self, other: _Trial, times: int) -> bool:
        """Return True if a run on `times` the batch made the same calls, with equal or `times` larger numbers."""
        pairs = [
            (one, many)
            for calls in zip(self.calls, other.calls, strict=False)
            for one, many in zip(*calls, strict=False)
        ]
        same_lengths = [*map(len, self.calls)] == [*map(len, other.calls)]
        return same_lengths and all(
            many == one or (type(one) is type(many) is int and many == times * one) for one, many in pairs
        )


def _run_trial(original: OriginalModel, example: ExampleInputs, batch: int) -> _Trial:
    def resized(leaf: torch.Tensor) -> torch.Tensor:
        return mode.from_tensor(torch.cat([leaf[:1]] * batch) if has_batch_dimension(leaf) else leaf)

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        made = mode.from_tensor(tensor)
        weight_values.set_values(made, tensor.detach())
        return made

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    log, weight_values = _FunctionLog(), WeightValues()
    arguments, keywords = example.call(list(map(resized, example.tensors)))
    model = original.copy(fake)
    with mode, weight_values, log, quiet_in_this_thread():
        results, _ = flatten(model(*arguments, **keywords))
    return _Trial([tuple(result.shape) for result in results], log.calls)


class _FunctionLog(TorchFunctionMode):
    """Records calls of PyTorch functions with their non-tensor arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        leaves = pytree.tree_leaves((arguments, keywords))
        self.calls.append((function, *(leaf for leaf in leaves if not isinstance(leaf, torch.Tensor))))
        return function(*arguments, **(keywords or {}))


@dataclass(frozen=True)
class ExportedModel:
    """An exported program and the interface of its model."""

    program: torch.export.ExportedProgram
    structure: pytree.TreeSpec | None
    """Structure of the model's results; None if it is that of the program."""
    input_names: InputNames


def export_symbolic(
    original: OriginalModel, example: ExampleInputs, is_symbolic: Callable[[int], bool]
) -> ExportedModel | None:
    """Export the model with symbolic sizes in the dimensions that `is_symbolic` selects; None if that fails."""
    if not example.batch:
        return None

    def doubled(leaf: torch.Tensor) -> torch.Tensor:
        """Double a batch of one, which export would specialize."""
        return torch.cat([leaf, leaf]) if leaf.dim() > 1 and leaf.shape[0] == 1 else leaf

    def dynamic(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() < 2:
            return None
        return {
            dimension: torch.export.Dim.AUTO
            for dimension, size in enumerate(leaf.shape)
            if size > 1 and is_symbolic(dimension)
        }

    model = original.copy()
    adapter = _ExportAdapter(original, model, example)
    arguments = open_dataclasses(example.call(list(map(doubled, example.tensors))))
    try:
        shapes = _named_shapes(model, pytree.tree_map(dynamic, arguments))
        with export_context():
            exported = torch.export.export(
                model, arguments[0], arguments[1], dynamic_shapes=shapes, strict=False
            )
        return ExportedModel(exported, adapter.structure, adapter.input_names)
    except Exception:  # if it persists, the export with fixed sizes reports it
        return None


def _named_shapes(model: torch.nn.Module, shapes: tuple[Any, Any]) -> Any:
    """Bind shapes to the parameters of `forward`, of which a variadic one may take several."""
    positional, named = shapes
    return dict(inspect.signature(model.forward).bind(*positional, **named).arguments)


def _model_frames(error: Exception) -> list[traceback.FrameSummary]:
    """Return the frames of an error's traceback outside of PyTorch and this package."""
    internal = {pathlib.Path(torch.__file__).parent, pathlib.Path(__file__).parent}
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if internal.isdisjoint(pathlib.Path(frame.filename).parents)]


def _describe_failure(model: torch.nn.Module, error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    name = type(model).__name__
    kind = type(error).__name__
    if "UnbackedSymbol" in kind:  # a data-dependent size
        return f"{name} computes a size from a tensor's values, but a plan's sizes are fixed; mask elements instead"
    if "data-dependent" in str(error).lower() or "DataDependent" in kind:
        frames = _model_frames(error)
        if frames and frames[-1].filename == trees.__file__:  # nothing read the number but `flatten`
            return (
                f"{name} returns a number that it reads from a tensor, as `item` does, but a plan is fixed before the "
                "number is known: return the tensor instead"
            )
        location = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
        return (
            f"{name} branches on the values of its tensors, but a plan is fixed before the values are known. Remove "
            f"the branch{location}, or compile the parts of the model around it"
        )
    return f"{name} cannot be captured as a graph of tensor operations: {kind}: {text[0]}"
