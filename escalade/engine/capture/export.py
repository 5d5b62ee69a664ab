"""Capture of a PyTorch module as a graph, for inputs of one size or of any: by tracing, or through `torch.export`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from escalade.device.strides import empty, layout_of
from escalade.engine.capture.example_inputs import ExampleInputs, require_module
from escalade.engine.capture.global_state import preserve_global_state
from escalade.engine.capture.model_copy import OriginalModel
from escalade.engine.capture.python_state import require_repeatable
from escalade.engine.capture.reader import CaptureError
from escalade.engine.capture.trace import trace_graph
from escalade.engine.capture.weights import named_tensors
from escalade.engine.graph.graph import Graph

Result = TypeVar("Result")


def capture(
    model: torch.nn.Module,
    arguments: Sequence[Any],
    keywords: Mapping[str, Any] | None = None,
    *,
    owned: Sequence[torch.Tensor] = (),
    autocast: bool = False,
) -> Graph:
    """Capture the model's operations on inputs like these, for any batch size if the model allows it.

    The model is captured in evaluation mode, whatever its mode. Only copies of it run, so it and everything it holds
    are unchanged. The graph copies its weights, except tensors in `owned`, which nothing else uses. With `autocast`,
    the caller's autocast state applies to the captured operations.
    """
    require_module(model)
    example = ExampleInputs.of(arguments, keywords)
    return with_original(model, owned, autocast, lambda original: graph_of(original, example))


def with_original(
    model: torch.nn.Module,
    owned: Sequence[torch.Tensor],
    autocast: bool,
    run_capture: Callable[[OriginalModel], Result],
) -> Result:
    """Return `run_capture(original)`, called with global state preserved and `torch.compile` disabled."""
    # If Dynamo is not loaded, nothing is compiled; loading it takes seconds.
    uses_dynamo = "torch._dynamo" in sys.modules

    def run() -> Result:
        try:
            with (
                preserve_global_state(model, autocast) as global_state,
                torch.compiler.set_stance("force_eager") if uses_dynamo else nullcontext(),
            ):
                return run_capture(OriginalModel(model, owned, global_state.named, global_state.find_change))
        except RecursionError as error:
            raise CaptureError(
                f"{type(model).__name__} holds objects nested more deeply than Python's recursion limit of "
                f"{sys.getrecursionlimit()}; flatten them, or raise it with sys.setrecursionlimit"
            ) from error

    # Compiled submodules run eagerly, and so does this code if the caller itself is compiled.
    return torch.compiler.disable(run)() if uses_dynamo else run()


def graph_of(original: OriginalModel, example: ExampleInputs) -> Graph:
    """Capture the model for inputs of these sizes, for any batch size if it allows that."""
    graph = trace_graph(original, example)
    if graph is None:
        from escalade.engine.capture.torch_export import batched_graph, fixed_graph

        graph = batched_graph(original, example) or fixed_graph(original, example)
    require_repeatable(original, example)
    return graph


_MAX_PROGRAMS = 8  # cached symbolic programs; a model that branches on sizes has one per branch
_MAX_FAILURES = 2  # failed symbolic exports before giving up: they are far slower than fixed-size ones


class AnySize:
    """Captures a model, as it was at construction, for several input sizes.

    The first capture is for the example's size, since most models see no other. A traceable model is traced for each
    further size. Any other is exported with symbolic sizes at its second size, and further sizes are substituted
    without running the model. If the program's guards exclude a size, or a graph cannot represent its symbols, the
    model is exported for that size.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        arguments: Sequence[Any],
        keywords: Mapping[str, Any] | None = None,
        *,
        owned: Sequence[torch.Tensor] = (),
        autocast: bool = False,
    ) -> None:
        """Takes the arguments of `capture`; `graph` is its result."""
        require_module(model)
        example = ExampleInputs.of(arguments, keywords)
        self._autocast = autocast

        def run_capture(original: OriginalModel) -> Graph:
            self._snapshot = original.snapshot()
            return graph_of(original, example)

        self.graph = with_original(model, owned, autocast, run_capture)
        self.graph.state_shapes = _state_shapes(self._snapshot.model)
        self._structure = example.structure
        self._templates = [(one.dtype, layout_of(one), one.device) for one in example.tensors]
        """Dtypes, devices and other properties of the example's tensors, except shapes and contents."""
        self._programs: list[Any] = []
        self._failures = 0 if self.graph.is_batched else 1
        """Number of sizes for which the symbolic export failed."""

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The parameters and buffers that captures use, by name."""
        return dict(named_tensors(self._snapshot.model))

    def graph_for(self, shapes: Sequence[Sequence[int]]) -> Graph:
        """Capture the model for inputs of these shapes, for any batch size if it allows that."""
        templates = zip(self._templates, shapes, strict=True)
        inputs = [empty(shape, *template).zero_() for template, shape in templates]
        example = ExampleInputs(inputs, self._structure)

        def run_capture(original: OriginalModel) -> Graph:
            graph = capture_graph(original)
            require_repeatable(original, example)
            return graph

        def capture_graph(original: OriginalModel) -> Graph:
            if (graph := trace_graph(original, example)) is not None:
                return graph
            from escalade.engine.capture.torch_export import (
                SymbolicProgram,
                batched_graph,
                export_symbolic,
                fixed_graph,
            )

            for program in self._programs:
                if (graph := program.graph(original, example)) is not None:
                    return graph
            if self._failures < _MAX_FAILURES:
                exported = export_symbolic(original, example, lambda dimension: True)
                program = None if exported is None else SymbolicProgram(exported)
                if program is not None and (graph := program.graph(original, example)) is not None:
                    self._programs = [program, *self._programs][:_MAX_PROGRAMS]
                    return graph
                if (graph := batched_graph(original, example)) is not None:
                    return graph
                self._failures += 1
            return fixed_graph(original, example)

        return with_original(self._snapshot.model, self._snapshot.tensors, self._autocast, run_capture)


def _state_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of the state dict's entries; None if it holds anything but tensors."""
    state = model.state_dict()
    if not all(isinstance(value, torch.Tensor) for value in state.values()):
        return None
    return {name: tuple(tensor.shape) for name, tensor in state.items()}
