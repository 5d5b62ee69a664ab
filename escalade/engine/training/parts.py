"""Training with `torch.compile`: AOTAutograd's forward and backward graphs as plans."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from escalade.engine.calls import BufferedCalls
from escalade.engine.capture.functional import (
    AotGraph,
    GraphResult,
    PassedThrough,
    capture_aot_graph,
    operators_with_kernels,
)
from escalade.engine.graph.forms import InputFormat
from escalade.engine.passes import optimize_step
from escalade.engine.plan.constants import ConstantCache
from escalade.engine.plan.planner import make_plan
from escalade.engine.plan.stepwise import program_for
from escalade.errors import EscaladeError
from escalade.ops.base.card import Card

MAX_PLANS = 8
"""Plans cached per graph, one per combination of input shapes and formats; least recently used are evicted."""


def compile_for_training(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    dtype: str,
    warn: Callable[[str], None],
    *,
    on_twin: bool = False,
) -> Callable[..., Any]:
    """Compile the forward and backward pass of a traced module; PyTorch runs a graph that cannot be planned.

    `dtype`, fp32 or tf32, selects how fp32 is multiplied. AOTAutograd's partitioner decides which activations are saved
    for backward and which are recomputed.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compiled(part: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        made: Callable[..., Any] = make_boxed_func(PlannedPart(part, dtype, warn, on_twin))
        return made

    with operators_with_kernels():
        made: Callable[..., Any] = aot_autograd(
            fw_compiler=compiled, bw_compiler=compiled, partition_fn=min_cut_rematerialization_partition
        )(module, example_inputs)
    return made


class PlannedPart:
    """An AOTAutograd graph, planned at the first call with each kind of inputs. On the CPU PyTorch runs it."""

    def __init__(
        self, module: torch.fx.GraphModule, dtype: str, warn: Callable[[str], None], on_twin: bool
    ) -> None:
        self._module, self._dtype, self._warn, self._on_twin = module, dtype, warn, on_twin
        self._parts: dict[tuple[Any, ...], _CallablePart | None] = {}
        self._lock = threading.Lock()

    def __call__(self, *inputs: Any) -> Any:
        device = next((one.device for one in inputs if isinstance(one, torch.Tensor)), torch.device("cpu"))
        if device.type != "cuda" and not self._on_twin:
            return self._module(*inputs)
        key = tuple(
            (one.shape, InputFormat.of(one), one.device) if isinstance(one, torch.Tensor) else one
            for one in inputs
        )
        with self._lock:
            callable_part = self._parts.pop(key) if key in self._parts else self._planned(inputs, device)
            while len(self._parts) >= MAX_PLANS:
                del self._parts[next(iter(self._parts))]
            self._parts[key] = callable_part
        return self._module(*inputs) if callable_part is None else callable_part(inputs)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _planned(self, inputs: Sequence[Any], device: torch.device) -> _CallablePart | None:
        try:
            return _CallablePart(capture_aot_graph(self._module, inputs), inputs, self._dtype, device)
        except EscaladeError as error:
            self._warn(f"PyTorch runs this part of the model itself: {error}")
            return None


class _CallablePart:
    """The plan of a graph, ready to be called."""

    def __init__(self, part: AotGraph, inputs: Sequence[Any], dtype: str, device: torch.device) -> None:
        self._results = part.results
        self._tensor_positions = [place for place, one in enumerate(inputs) if isinstance(one, torch.Tensor)]
        entries = zip(part.graph.inputs, self._tensor_positions, strict=True)
        formats = {entry.name: InputFormat.of(inputs[place]) for entry, place in entries}
        input_layouts = {name: each.layout for name, each in formats.items() if each.layout != "flat"}
        self._types = [getattr(torch, name) for name in part.graph.output_types]
        graph = optimize_step(part.graph, input_layouts, part.layouts, dtype, Card.of(device))
        plan = make_plan(graph, dtype, device, formats)
        constants = ConstantCache(dtype, device, typed=True)
        self._calls = BufferedCalls(program_for(plan, constants, device))

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(self, inputs: Sequence[Any]) -> list[Any]:
        results = self._calls.call([inputs[place] for place in self._tensor_positions])
        # Passes may widen results of the plan.
        made = [result.to(dtype) for result, dtype in zip(results, self._types, strict=True)]
        return [
            inputs[one.index]
            if isinstance(one, PassedThrough)
            else made[one.index]
            if isinstance(one, GraphResult)
            else one
            for one in self._results
        ]
