"""Capture of a PyTorch module as a graph, by tracing or through `torch.export`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from escalade.engine.capture.example_inputs import ExampleInputs, require_module
from escalade.engine.capture.global_state import preserve_global_state
from escalade.engine.capture.model_copy import OriginalModel
from escalade.engine.capture.python_state import require_repeatable
from escalade.engine.capture.reader import CaptureError
from escalade.engine.capture.trace import trace_graph
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
