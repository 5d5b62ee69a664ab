"""Makes a graph of a PyTorch module, through `torch.export`."""

from __future__ import annotations

import inspect
import pathlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from escalade.engine.capture.conditions import Sizes
from escalade.engine.capture.reader import CaptureError, NotBatched, Reader
from escalade.engine.capture.separate import Original
from escalade.engine.capture.surroundings import undisturbed
from escalade.engine.graph.graph import Batch, Graph, fixed
from escalade.engine.graph.trees import TreeError, flatten
from escalade.errors import UnsupportedError

Result = TypeVar("Result")


def capture(
    model: torch.nn.Module,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any] | None = None,
    *,
    ours: Sequence[torch.Tensor] = (),
    autocast: bool = False,
) -> Graph:
    """The model's operations on inputs like these, for any batch size if the model allows it.

    The model is captured in evaluation mode, whatever mode it is in. It is never run: copies of it are, so that it and
    all that it holds stay as they are. The graph has tensors of its own, but takes those that are `ours` as they are.
    With `autocast`, what the caller's autocast makes of the model is captured.
    """
    require_module(model)
    given = Given.of(arguments, keywords)
    return with_original(model, ours, autocast, lambda original: graph_of(original, given))


def with_original(
    model: torch.nn.Module,
    ours: Sequence[torch.Tensor],
    autocast: bool,
    work: Callable[[Original], Result],
) -> Result:
    """What comes of some work with a model whose copies may be run meanwhile."""

    def run() -> Result:
        try:
            with (
                undisturbed(model, autocast) as outside,
                torch.compiler.set_stance("force_eager"),
            ):
                return work(Original(model, ours, outside))
        except RecursionError as error:
            raise CaptureError(
                f"{type(model).__name__} holds objects inside each other more deeply than Python can follow"
            ) from error

    # What is compiled with `torch.compile` runs as it is, also if somebody compiles whoever asks for this.
    return torch.compiler.disable(run)()


def require_module(model: object) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UnsupportedError(f"compile takes a torch.nn.Module, not {type(model).__name__}")


@dataclass(frozen=True)
class Given:
    """Example inputs."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @classmethod
    def of(cls, arguments: Sequence[Any], keywords: Mapping[str, Any] | None) -> Given:
        """What somebody gave, if a model can be captured with them."""
        if keywords is not None and not isinstance(keywords, Mapping):
            raise UnsupportedError(
                f"example_keywords is of type {type(keywords).__name__}; it takes a dict of arguments by name"
            )
        given = cls(tuple(arguments), dict(keywords or {}))
        given._check()
        return given

    @property
    def batch(self) -> int:
        """The number of items, at least two: export would take one for a constant. Zero: the tensors have none in
        common."""
        sizes = {tensor.shape[0] for tensor in self.tensors if tensor.dim() > 1}
        return max(*sizes, 2) if len(sizes) == 1 and 0 not in sizes else 0

    @property
    def tensors(self) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves((self.arguments, self.keywords))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def map(self, change: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other leaves, in containers that are nobody else's."""
        return pytree.tree_map(change, (self.arguments, self.keywords))

    def _check(self) -> None:
        if not self.tensors:
            raise UnsupportedError(
                "compile needs example inputs: tensors like those the model will be called with"
            )
        for tensor in self.tensors:
            if not tensor.numel():
                raise UnsupportedError(
                    f"an example input of shape {tuple(tensor.shape)} has no elements: compile takes tensors like "
                    "those that the model will be called with, of at least one item"
                )
            if tensor.dtype.is_complex or tensor.is_sparse or tensor.is_quantized:
                raise UnsupportedError(
                    f"an input of {tensor.dtype} ({tensor.layout}): compile takes dense tensors of real numbers"
                )


class _Returned:
    """Lets a copy of the model return its tensors alone, and keeps the structure that they come in: `torch.export` does
    not know every one. Those of `torch.fx` it knows, and it runs such a graph without hooks.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.structure: pytree.TreeSpec | None = None
        if not isinstance(model, torch.fx.GraphModule):
            model.register_forward_hook(self._note)  # behind the model's own, which see what it returns

    def _note(self, model: torch.nn.Module, arguments: Any, results: Any) -> tuple[torch.Tensor, ...]:
        tensors, self.structure = flatten(results)
        return tuple(tensors)


def graph_of(original: Original, given: Given) -> Graph:
    """What the model does with inputs of these sizes, for any batch size if it allows that."""
    graph = _batched_graph(original, given)
    if graph is not None:
        return graph
    model = original.copied()
    returned = _Returned(model)
    arguments, keywords = given.map(lambda leaf: leaf)
    try:
        exported = torch.export.export(model, arguments, keywords, strict=False)
    except TreeError as error:
        raise CaptureError(f"{type(model).__name__} returns {error}") from error
    except Exception as error:
        raise CaptureError(_explain(model, error)) from error
    graph = Reader(exported, original, returned.structure, given.batch).graph()
    graph.notes.append(
        "the model works for this batch size only: what it does depends on the batch in other ways than by a factor"
    )
    return graph


def _batched_graph(original: Original, given: Given) -> Graph | None:
    """The graph for more than the batch size of these inputs; None if there is none."""
    exported = export_free(original, given, lambda dimension: dimension == 0)
    return None if exported is None else read_batched(exported, original, given)


def read_batched(
    exported: Exported, original: Original, given: Given, sizes: Sizes = MappingProxyType({})
) -> Graph | None:
    """The graph of a program for the batch size of these inputs and more, where other symbols are numbers."""
    try:
        graph = Reader(exported.program, original, exported.structure, given.batch, sizes).graph()
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

    Export never tries it: it takes a size of one for a constant. Copies of the model, themselves of tensors without
    contents, run on one such item and on two.
    """
    try:
        one, two = (_trial(original, given, batch) for batch in (1, 2))
    except Exception:  # without contents it does not run: nothing is known against the graph
        return True
    expected = [fixed(graph.shape_of(name), 1) for name in graph.outputs]
    return one.shapes == expected and one.calls == two.calls


@dataclass(frozen=True)
class _Trial:
    """What came of a model run on tensors without contents."""

    shapes: list[tuple[int, ...]]
    """The sizes of its results."""
    calls: list[Any]
    """The functions of PyTorch's that it called."""


def _trial(original: Original, given: Given, batch: int) -> _Trial:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def items(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return mode.from_tensor(torch.cat([leaf[:1]] * batch) if leaf.dim() > 1 else leaf)

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    noted = _Noted()
    arguments, keywords = given.map(items)
    model = original.copied(mode.from_tensor)
    with mode, noted:
        results, _ = flatten(model(*arguments, **keywords))
    return _Trial([tuple(result.shape) for result in results], noted.calls)


class _Noted(TorchFunctionMode):
    """Notes the functions of PyTorch's that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        self.calls.append(function)
        return function(*arguments, **(keywords or {}))


@dataclass(frozen=True)
class Exported:
    """A program, and how the model returns its results; None: as the program does."""

    program: torch.export.ExportedProgram
    structure: pytree.TreeSpec | None


def export_free(original: Original, given: Given, free: Callable[[int], bool]) -> Exported | None:
    """The program with symbols for sizes in dimensions that are `free`, the batch among them; None if the model does
    not allow it."""
    if not given.batch:
        return None

    def widened(leaf: Any) -> Any:
        """A batch of one would be taken for a constant."""
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.shape[0] == 1:
            return torch.cat([leaf, leaf])
        return leaf

    def dynamic(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() < 2:
            return None
        return {
            dimension: torch.export.Dim.AUTO
            for dimension, size in enumerate(leaf.shape)
            if size > 1 and free(dimension)
        }

    model = original.copied()
    returned = _Returned(model)
    wide = given.map(widened)
    try:
        shapes = _named_shapes(model, pytree.tree_map(dynamic, wide))
        exported = torch.export.export(model, wide[0], wide[1], dynamic_shapes=shapes, strict=False)
        return Exported(exported, returned.structure)
    except Exception:  # whatever it is, the attempt with fixed sizes will say it
        return None


def _named_shapes(model: torch.nn.Module, shapes: tuple[Any, Any]) -> Any:
    """The shapes by the names of the model's parameters, of which one may stand for several arguments."""
    positional, named = shapes
    return dict(inspect.signature(model.forward).bind(*positional, **named).arguments)


def _place(error: Exception) -> str:
    """Where in the model's own code it happened."""
    theirs = pathlib.Path(torch.__file__).parent
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if theirs not in pathlib.Path(frame.filename).parents]
    own = [frame for frame in inside if frame.filename != __file__]
    return f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""


def _explain(model: torch.nn.Module, error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    name = type(model).__name__
    kind = type(error).__name__
    if "data-dependent" in str(error).lower() or "GuardOnDataDependent" in kind:
        return (
            f"{name} decides by the values of its tensors which operations to run, and a plan is fixed beforehand. "
            f"Take the decision out of the model{_place(error)}, or compile the parts around it"
        )
    return f"{name} cannot be captured as a graph of tensor operations: {kind}: {text[0]}"
