"""Makes a graph of a PyTorch module, through `torch.export`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from escalade.engine.capture.reader import CaptureError, NotBatched, Reader
from escalade.engine.capture.separate import Original
from escalade.engine.capture.surroundings import undisturbed
from escalade.engine.graph.graph import Batch, Graph, fixed
from escalade.engine.graph.trees import TreeError, flatten
from escalade.errors import UnsupportedError


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
    given = _Given(tuple(arguments), dict(keywords or {}))
    given.check()

    def run() -> Graph:
        try:
            with (
                undisturbed(model, autocast) as outside,
                torch.compiler.set_stance("force_eager"),
            ):
                return _graph(Original(model, ours, outside), given)
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
class _Given:
    """Example inputs."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]

    @property
    def tensors(self) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves((self.arguments, self.keywords))
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def map(self, change: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with other leaves, in containers that are nobody else's."""
        return pytree.tree_map(change, (self.arguments, self.keywords))

    def check(self) -> None:
        if not self.tensors:
            raise UnsupportedError(
                "compile needs example inputs: tensors like those the model will be called with"
            )
        for tensor in self.tensors:
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


def _graph(original: Original, given: _Given) -> Graph:
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
    graph = Reader(exported, original, returned.structure).graph()
    graph.notes.append(
        "the model works for this batch size only: what it does depends on the batch in other ways than by a factor"
    )
    return graph


def _batched_graph(original: Original, given: _Given) -> Graph | None:
    """The graph for more than the batch size of these inputs; None if there is none."""
    found = _export_batched(original, given)
    if found is None:
        return None
    exported, structure = found
    try:
        graph = Reader(exported, original, structure).graph()
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


def _holds_for_one(original: Original, given: _Given, graph: Graph) -> bool:
    """Whether the model's results have the graph's sizes for a batch of one too: `squeeze()` takes that away.

    Export never tries it: it takes a size of one for a constant. A copy of the model, itself of tensors without
    contents, runs on such tensors.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    def first(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return mode.from_tensor(leaf[:1] if leaf.dim() > 1 else leaf)

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        arguments, keywords = given.map(first)
        model = original.copied(mode.from_tensor)
        with mode:
            results, _ = flatten(model(*arguments, **keywords))
    except Exception:  # without contents it does not run: nothing is known against the graph
        return True
    return [tuple(result.shape) for result in results] == [
        fixed(graph.shape_of(name), 1) for name in graph.outputs
    ]


def _export_batched(
    original: Original, given: _Given
) -> tuple[torch.export.ExportedProgram, pytree.TreeSpec | None] | None:
    """The program with a free batch size, and how the model returns its results; None if it does not allow that."""
    sizes = {tensor.shape[0] for tensor in given.tensors if tensor.dim() > 1}
    if len(sizes) != 1 or 0 in sizes:
        return None

    def widened(leaf: Any) -> Any:
        """A batch of one would be taken for a constant."""
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 1 and leaf.shape[0] == 1:
            return torch.cat([leaf, leaf])
        return leaf

    def dynamic(leaf: Any) -> Any:
        return {0: torch.export.Dim.AUTO} if isinstance(leaf, torch.Tensor) and leaf.dim() > 1 else None

    model = original.copied()
    returned = _Returned(model)
    wide = given.map(widened)
    try:
        shapes = _named_shapes(model, pytree.tree_map(dynamic, wide))
        exported = torch.export.export(model, wide[0], wide[1], dynamic_shapes=shapes, strict=False)
        return exported, returned.structure
    except Exception:  # whatever it is, the attempt with fixed sizes will say it
        return None


def _named_shapes(model: torch.nn.Module, shapes: tuple[Any, Any]) -> Any:
    """The shapes by the names of the model's parameters, of which one may stand for several arguments."""
    positional, named = shapes
    return dict(inspect.signature(model.forward).bind(*positional, **named).arguments)


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
