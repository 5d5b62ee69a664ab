"""Makes a graph of a PyTorch module: by following it, or through `torch.export`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import torch

from escalade.engine.capture.example_inputs import Given, require_module
from escalade.engine.capture.global_state import undisturbed
from escalade.engine.capture.model_copy import Original
from escalade.engine.capture.python_state import require_repeatable
from escalade.engine.capture.reader import CaptureError
from escalade.engine.capture.trace import traced
from escalade.engine.graph.graph import Graph

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

    compiles = "torch._dynamo" in sys.modules  # without it nothing is compiled, and it takes seconds to load

    def run() -> Result:
        try:
            with (
                undisturbed(model, autocast) as outside,
                torch.compiler.set_stance("force_eager") if compiles else nullcontext(),
            ):
                return work(Original(model, ours, outside.named, outside.change))
        except RecursionError as error:
            raise CaptureError(
                f"{type(model).__name__} holds objects inside each other more deeply than Python can follow"
            ) from error

    # What is compiled with `torch.compile` runs as it is, also if somebody compiles whoever asks for this.
    return torch.compiler.disable(run)() if compiles else run()


def graph_of(original: Original, given: Given) -> Graph:
    """What the model does with inputs of these sizes, for any batch size if it allows that."""
    graph = traced(original, given)
    if graph is None:
        from escalade.engine.capture.programs import batched_graph, fixed_graph

        graph = batched_graph(original, given) or fixed_graph(original, given)
    require_repeatable(original, given)
    return graph
