"""Training behind `torch.compile`: AOTAutograd's forward and backward graphs, each a plan."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from escalade.engine.calls import BufferedCalls
from escalade.engine.capture.aot_graph import AotGraph, GraphResult, PassedThrough, capture_aot_graph
from escalade.engine.capture.functional import keep_operators_whole
from escalade.engine.graph.forms import InputFormat
from escalade.engine.passes import optimize_step
from escalade.engine.plan.constants import ConstantCache
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.engine.plan.planner import make_plan
from escalade.engine.plan.stepwise import StepwiseProgram, is_faster_stepwise
from escalade.errors import EscaladeError
from escalade.ops.base.card import Card

MOST_PLANS = 8
"""Kinds of inputs that a part keeps plans for; the one not used for longest goes first."""


def compile_for_training(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    dtype: str,
    say: Callable[[str], None],
    *,
    on_twin: bool = False,
) -> Callable[..., Any]:
    """The traced module with gradients, whose passes forward and backward are plans; what has none runs in PyTorch.

    `dtype`, fp32 or tf32, is how fp32 is multiplied. What backward reads is kept, or computed again where AOTAutograd's
    partitioner finds that cheaper.
    """

    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compiled(part: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        made: Callable[..., Any] = make_boxed_func(PlannedPart(part, dtype, say, on_twin))
        return made

    with keep_operators_whole():
        made: Callable[..., Any] = aot_autograd(
            fw_compiler=compiled, bw_compiler=compiled, partition_fn=min_cut_rematerialization_partition
        )(module, example_inputs)
    return made


class PlannedPart:
    """A graph of AOTAutograd's, planned for each kind of inputs when they first come. On the CPU PyTorch runs it."""

    def __init__(
        self, module: torch.fx.GraphModule, dtype: str, say: Callable[[str], None], on_twin: bool
    ) -> None:
        self._module, self._dtype, self._say, self._on_twin = module, dtype, say, on_twin
        self._ready: dict[tuple[Any, ...], _Ready | None] = {}
        self._lock = threading.Lock()

    def __call__(self, *given: Any) -> Any:
        device = next((one.device for one in given if isinstance(one, torch.Tensor)), torch.device("cpu"))
        if device.type != "cuda" and not self._on_twin:
            return self._module(*given)
        key = tuple(
            (one.shape, InputFormat.of(one), one.device) if isinstance(one, torch.Tensor) else one
            for one in given
        )
        with self._lock:
            ready = self._ready.pop(key) if key in self._ready else self._planned(given, device)
            while len(self._ready) >= MOST_PLANS:
                del self._ready[next(iter(self._ready))]
            self._ready[key] = ready
        return self._module(*given) if ready is None else ready(given)

    @torch.inference_mode(False)
    @torch.no_grad()
    def _planned(self, given: Sequence[Any], device: torch.device) -> _Ready | None:
        try:
            return _Ready(capture_aot_graph(self._module, given), given, self._dtype, device)
        except EscaladeError as error:
            self._say(f"PyTorch runs this part of the model itself: {error}")
            return None


class _Ready:
    """A part's plan, ready to be called."""

    def __init__(self, part: AotGraph, given: Sequence[Any], dtype: str, device: torch.device) -> None:
        self._results = part.results
        self._places = [place for place, one in enumerate(given) if isinstance(one, torch.Tensor)]
        entries = zip(part.graph.inputs, self._places, strict=True)
        formats = {entry.name: InputFormat.of(given[place]) for entry, place in entries}
        given_as = {name: each.layout for name, each in formats.items() if each.layout != "flat"}
        types = [getattr(torch, name) for name in part.graph.output_types]
        graph = optimize_step(part.graph, given_as, part.layouts, dtype, Card.of(device))
        plan = make_plan(graph, dtype, device, formats)
        constants = ConstantCache(dtype, device, typed=True)
        kind = StepwiseProgram if is_faster_stepwise(plan, Card.of(device)) else KernelProgram
        self._calls = BufferedCalls(kind(plan, constants, device), types)

    @torch.inference_mode(False)
    @torch.no_grad()
    def __call__(self, given: Sequence[Any]) -> list[Any]:
        made = self._calls.call([given[place] for place in self._places])
        return [
            given[one.index]
            if isinstance(one, PassedThrough)
            else made[one.index]
            if isinstance(one, GraphResult)
            else one
            for one in self._results
        ]
