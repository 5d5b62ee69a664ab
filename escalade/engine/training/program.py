"""A training step's plan made ready: what computes gradients, and what the optimiser does with them, in one run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch

from escalade.device.graph import CapturedGraph
from escalade.engine.nodes.arithmetic import own_arithmetic
from escalade.engine.nodes.lowering import OWN
from escalade.engine.plan.constants import ConstantCache
from escalade.engine.plan.kernels import PlanKernels
from escalade.engine.plan.multi_output import MultiOutputCalls
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.step import ConstantForm

Work = Callable[[], None]
"""What is done in front of a plan (inputs are cast) or behind it (buffers are written, parameters stepped)."""


class StepProgram(Protocol):
    """A plan over tensors that are the same at every run."""

    plan: Plan

    def results(self) -> tuple[torch.Tensor, ...]:
        """Where the results lie: the same tensors after every run."""

    def finish_with(self, finish: Work, gather: Work | None = None, meet: Work | None = None) -> None:
        """Says what is done behind the plan from now on, as part of every run: `gather`, then `meet`, which waits for
        other processes and is part of no CUDA graph, then `finish`."""

    def run(self) -> None:
        """One step, on the current stream."""


class KernelStep(PlanKernels):
    """The kernels of a step's plan; on the GPU one CUDA graph of them all, the optimiser's among them."""

    def __init__(
        self,
        plan: Plan,
        constants: ConstantCache,
        device: torch.device,
        bound: Mapping[str, torch.Tensor],
        prepare: Work,
        *,
        as_graph: bool = True,
    ) -> None:
        prepare()
        super().__init__(plan, constants, device, bound)
        self.prepare = prepare
        """What is done in front of the plan, as part of every run."""
        self.finish: Work = _nothing
        """What is done behind it."""
        self._gather: Work = _nothing
        self._meet: Work | None = None
        self._as_graph = as_graph
        self._graphs: list[CapturedGraph] = []

    def results(self) -> tuple[torch.Tensor, ...]:
        return self.outputs

    def finish_with(self, finish: Work, gather: Work | None = None, meet: Work | None = None) -> None:
        self.finish, self._gather, self._meet = finish, gather or _nothing, meet
        self._graphs = []

    def run(self) -> None:
        if len(self._graphs) == 1:
            self._graphs[0].replay()
            return
        works = self._works()
        if self._capture_stream is not None and self._as_graph:
            side = self._capture_stream
            self._graphs = self._graphs or [CapturedGraph(partial(_recorded, work), side) for work in works]
            works = [graph.replay for graph in self._graphs]
        for number, work in enumerate(works):
            if number > 0 and self._meet is not None:
                self._meet()
            work()

    def _works(self) -> list[Work]:
        """What is done in front of a meeting with other processes and behind it; all in one where there is none."""
        if self._meet is None:
            return [self._all]
        return [self._make_gradients, self.finish]

    def _make_gradients(self) -> None:
        self.prepare()
        self.run_steps()
        self._gather()

    def _all(self) -> None:
        self._make_gradients()
        self.finish()


class ReferenceStep:
    """A step's plan with PyTorch doing every node, on the CPU."""

    def __init__(
        self, plan: Plan, constants: ConstantCache, bound: Mapping[str, torch.Tensor], prepare: Work
    ) -> None:
        self.plan = plan
        self._prepare = prepare
        self._constants = {entry: constants.get(entry, plan.graph) for entry in plan.constants}
        self._bound = bound
        self._behind: tuple[Work, ...] = ()
        self._several = MultiOutputCalls(plan, torch.device("cpu"), everything=True)
        self._outputs = tuple(
            torch.zeros_like(bound[name]) if name in bound else _room(plan, name)
            for name in plan.graph.outputs
        )
        self._last = {
            name: number for number, step in enumerate(plan.steps) for name in step.node.inputs.values()
        }

    def results(self) -> tuple[torch.Tensor, ...]:
        return self._outputs

    def finish_with(self, finish: Work, gather: Work | None = None, meet: Work | None = None) -> None:
        self._behind = tuple(work for work in (gather, meet, finish) if work is not None)

    def run(self) -> None:
        graph = self.plan.graph
        kept = {*self._bound, *graph.outputs}
        values = dict(self._bound)
        self._prepare()
        with own_arithmetic(self.plan.dtype, torch.device("cpu")):
            for number, step in enumerate(self.plan.steps):
                inputs = {
                    role: self._constants[step.constant(role)] if name in graph.constants else values[name]
                    for role, name in step.node.inputs.items()
                }
                result = self._several.compute(step.node, inputs)
                values[step.node.name] = result.to(self.plan.forms[step.node.name].dtype)
                for name in {name for name in step.node.inputs.values() if self._last[name] == number} - kept:
                    values.pop(name, None)
            for room, name in zip(self._outputs, graph.outputs, strict=True):
                room.copy_(self._constant(name) if name in graph.constants else values[name])
        for work in self._behind:
            work()

    def _constant(self, name: str) -> torch.Tensor:
        return self._constants[ConstantForm(name, OWN)]


def _recorded(work: Work) -> tuple[()]:
    """Done while a graph is recorded; no launch in it is pointed elsewhere later."""
    work()
    return ()


def _room(plan: Plan, name: str) -> torch.Tensor:
    if name in plan.graph.constants:
        return torch.zeros_like(plan.graph.constants[name])
    form = plan.forms[name]
    return form.view(torch.zeros(max(form.bytes, 1), dtype=torch.uint8, device="cpu"), 0)


def _nothing() -> None:
    pass
