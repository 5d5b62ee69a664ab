"""Makes graphs of programs of `torch.export`, with symbols for sizes or without.

It takes seconds to load: a model that `trace` can follow does without it.
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

from escalade.engine.capture.conditions import Conditions, Sizes
from escalade.engine.capture.contents import Contents, answer
from escalade.engine.capture.example_inputs import Given, Names, is_by_items
from escalade.engine.capture.exported import NotBatched, Reader
from escalade.engine.capture.model_copy import Original
from escalade.engine.capture.python_state import Watch
from escalade.engine.capture.reader import CaptureError
from escalade.engine.capture.tracers import exporting, no_reports_of_this_thread
from escalade.engine.graph import trees
from escalade.engine.graph.graph import Batch, Graph, fixed
from escalade.engine.graph.trees import TreeError, flatten, opened
from escalade.errors import UnsupportedError

_SEVERAL = 7
"""Items to try a model with beside one, if it takes so many: no number of its own is likely to be so many times
another."""


class _Plainly:
    """Lets a copy of the model ask what it holds, take dataclasses as dicts and return its tensors alone, and keeps the
    structure that these come in: `torch.export` does not know every one. Those of `torch.fx` it knows, and it runs such
    a graph without hooks.
    """

    def __init__(self, original: Original, model: torch.nn.Module, given: Given) -> None:
        self.structure: pytree.TreeSpec | None = None
        self.called = given.names(model)
        self._given = given
        if not isinstance(model, torch.fx.GraphModule):
            answer(model)
            model.register_forward_pre_hook(self._closed, prepend=True, with_kwargs=True)
            model.register_forward_hook(self._note)  # behind the model's own, which see what it returns
            self._watch = Watch(original, model, exports=True)

    def _closed(self, model: torch.nn.Module, arguments: Any, keywords: Any) -> tuple[Any, Any]:
        leaves = pytree.tree_leaves((arguments, keywords))
        return self._given.call([leaf for leaf in leaves if isinstance(leaf, torch.Tensor)])

    def _note(self, model: torch.nn.Module, arguments: Any, results: Any) -> tuple[torch.Tensor, ...]:
        self._watch.note()  # PyTorch puts attributes back before it returns
        tensors, self.structure = flatten(results)
        return tuple(tensors)


def fixed_graph(original: Original, given: Given) -> Graph:
    """What the model does with inputs of these sizes alone."""
    model = original.copied()
    plainly = _Plainly(original, model, given)
    arguments, keywords = opened(given.call())
    try:
        with exporting():
            exported = torch.export.export(model, arguments, keywords, strict=False)
    except TreeError as error:
        raise CaptureError(f"{type(model).__name__} returns {error}") from error
    except Exception as error:
        raise CaptureError(_explain(model, error)) from error
    graph = Reader(exported, original, plainly.structure, given, plainly.called).graph()
    graph.notes.append(
        "the model works for this batch size only: what it does depends on the batch in other ways than by a factor"
    )
    return graph


def batched_graph(original: Original, given: Given) -> Graph | None:
    """The graph for more than the batch size of these inputs; None if there is none."""
    exported = export_free(original, given, lambda dimension: dimension == 0)
    return None if exported is None else read_batched(exported, original, given)


class Program:
    """The model with symbols for all sizes, and what must hold of them."""

    def __init__(self, exported: Exported) -> None:
        self._exported = exported
        program = exported.program
        self._conditions = Conditions(program)
        placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        names = program.graph_signature.user_inputs
        values = [placeholders[name].meta["val"] for name in names if name in placeholders]
        self._shapes = [tuple(value.shape) for value in values if isinstance(value, torch.Tensor)]

    def graph(self, original: Original, given: Given) -> Graph | None:
        """The graph for these inputs and any batch; None if the model does something else with them."""
        batches: set[sympy.Symbol] = set()
        sizes: dict[sympy.Symbol, int] = {}
        for shape, tensor in zip(self._shapes, given.tensors, strict=True):
            if len(shape) != tensor.dim():
                return None
            for dimension, (size, number) in enumerate(zip(shape, tensor.shape, strict=True)):
                symbol = size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)
                is_batch = symbol.is_Symbol and dimension == 0
                if is_batch:
                    batches.add(symbol)
                actual = given.batch if is_batch else number
                if (sizes.setdefault(symbol, actual) if symbol.is_Symbol else symbol) != actual:
                    return None
        if len(batches) != 1 or not self._conditions.hold_for(sizes):
            return None
        numbers = {symbol: size for symbol, size in sizes.items() if symbol not in batches}
        try:
            return read_batched(self._exported, original, given, numbers)
        except UnsupportedError:  # by symbols it is no graph of tensors; by numbers it may be
            return None


def read_batched(
    exported: Exported, original: Original, given: Given, sizes: Sizes = MappingProxyType({})
) -> Graph | None:
    """The graph of a program for the batch size of these inputs and more, where other symbols are numbers."""
    try:
        reader = Reader(exported.program, original, exported.structure, given, exported.called, sizes)
        graph = reader.graph()
    except NotBatched:
        return None
    if not graph.is_batched:
        return None
    if graph.batches[0] == 1 and not _holds_for_one(original, given, graph):
        graph.batches = (2, graph.batches[1])
    example = next(
        leaf.shape[0] // size.times
        for leaf, entry in zip(given.tensors, graph.inputs, strict=True)
        for size in entry.shape[:1]
        if isinstance(size, Batch)
    )
    least, most = graph.batches
    return graph if least <= example and (most is None or example <= most) else None


def _holds_for_one(original: Original, given: Given, graph: Graph) -> bool:
    """Whether the model does the same for a batch of one too: it may ask for that size, and `squeeze()` takes it away.

    Export never tries it: it takes a size of one for a constant, and what holds from two on for certain. Copies of the
    model, themselves of tensors without contents, run on one such item and on several.
    """
    most = graph.batches[1]
    count = _SEVERAL if most is None else min(most, _SEVERAL)
    try:
        one, several = (_trial(original, given, batch) for batch in (1, count))
    except Exception:  # without contents it does not run: nothing is known against the graph
        return True
    expected = [fixed(graph.shape_of(name), 1) for name in graph.outputs]
    return one.shapes == expected and one.is_of(several, count)


@dataclass(frozen=True)
class _Trial:
    """What came of a model run on tensors without contents."""

    shapes: list[tuple[int, ...]]
    """The sizes of its results."""
    calls: list[tuple[Any, ...]]
    """The functions of PyTorch's that it called, each with its arguments that are no tensors."""

    def is_of(self, other: _Trial, times: int) -> bool:
        """Whether a run on so many times the items called the same, but for numbers that grow with these."""
        pairs = [
            (one, many)
            for calls in zip(self.calls, other.calls, strict=False)
            for one, many in zip(*calls, strict=False)
        ]
        is_long = [*map(len, self.calls)] == [*map(len, other.calls)]
        return is_long and all(
            many == one or (type(one) is type(many) is int and many == times * one) for one, many in pairs
        )


def _trial(original: Original, given: Given, batch: int) -> _Trial:
    def items(leaf: torch.Tensor) -> torch.Tensor:
        return mode.from_tensor(torch.cat([leaf[:1]] * batch) if is_by_items(leaf) else leaf)

    def without(tensor: torch.Tensor) -> torch.Tensor:
        hollow = mode.from_tensor(tensor)
        contents.know(hollow, tensor.detach())
        return hollow

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    noted, contents = _Noted(), Contents()
    arguments, keywords = given.call(list(map(items, given.tensors)))
    model = original.copied(without)
    with mode, contents, noted, no_reports_of_this_thread():
        results, _ = flatten(model(*arguments, **keywords))
    return _Trial([tuple(result.shape) for result in results], noted.calls)


class _Noted(TorchFunctionMode):
    """Notes the functions of PyTorch's that are called, with all of their arguments but tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        leaves = pytree.tree_leaves((arguments, keywords))
        self.calls.append((function, *(leaf for leaf in leaves if not isinstance(leaf, torch.Tensor))))
        return function(*arguments, **(keywords or {}))


@dataclass(frozen=True)
class Exported:
    """A program, how the model returns its results, or None where it is as the program does, and what it calls what it
    is given."""

    program: torch.export.ExportedProgram
    structure: pytree.TreeSpec | None
    called: Names


def export_free(original: Original, given: Given, free: Callable[[int], bool]) -> Exported | None:
    """The program with symbols for sizes in dimensions that are `free`, the batch among them; None if the model does
    not allow it."""
    if not given.batch:
        return None

    def widened(leaf: torch.Tensor) -> torch.Tensor:
        """A batch of one would be taken for a constant."""
        return torch.cat([leaf, leaf]) if leaf.dim() > 1 and leaf.shape[0] == 1 else leaf

    def dynamic(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() < 2:
            return None
        return {
            dimension: torch.export.Dim.AUTO
            for dimension, size in enumerate(leaf.shape)
            if size > 1 and free(dimension)
        }

    model = original.copied()
    plainly = _Plainly(original, model, given)
    wide = opened(given.call(list(map(widened, given.tensors))))
    try:
        shapes = _named_shapes(model, pytree.tree_map(dynamic, wide))
        with exporting():
            exported = torch.export.export(model, wide[0], wide[1], dynamic_shapes=shapes, strict=False)
        return Exported(exported, plainly.structure, plainly.called)
    except Exception:  # whatever it is, the attempt with fixed sizes will say it
        return None


def _named_shapes(model: torch.nn.Module, shapes: tuple[Any, Any]) -> Any:
    """The shapes by the names of the model's parameters, of which one may stand for several arguments."""
    positional, named = shapes
    return dict(inspect.signature(model.forward).bind(*positional, **named).arguments)


def _own_frames(error: Exception) -> list[traceback.FrameSummary]:
    """Where it happened, but for PyTorch's code and what captures."""
    theirs = {pathlib.Path(torch.__file__).parent, pathlib.Path(__file__).parent}
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if theirs.isdisjoint(pathlib.Path(frame.filename).parents)]


def _explain(model: torch.nn.Module, error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    name = type(model).__name__
    kind = type(error).__name__
    if "UnbackedSymbol" in kind:  # one that stands for a size of values
        return f"{name} takes a size out of a tensor's values; a plan's sizes are fixed beforehand"
    if "data-dependent" in str(error).lower() or "DataDependent" in kind:
        own = _own_frames(error)
        if own and own[-1].filename == trees.__file__:  # it was only passed on, up to the results
            return (
                f"{name} returns a number that it takes out of a tensor, as `item` does, and a plan is fixed before "
                "there is one: have the model return the tensor"
            )
        place = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
        return (
            f"{name} decides by the values of its tensors which operations to run, and a plan is fixed beforehand. "
            f"Take the decision out of the model{place}, or compile the parts around it"
        )
    return f"{name} cannot be captured as a graph of tensor operations: {kind}: {text[0]}"
