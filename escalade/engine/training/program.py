"""Run a training step's plan and the optimizer in one go: one CUDA graph on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Protocol

import torch

from escalade.engine.nodes.aten import reporting_errors
from escalade.engine.nodes.evaluate import own_arithmetic
from escalade.engine.nodes.lowering import OWN
from escalade.engine.plan.constants import ConstantCache
from escalade.engine.plan.kernels import PlanKernels
from escalade.engine.plan.plan import ConstantForm, Plan
from escalade.engine.plan.program import MultiOutputCalls

_HOST = torch.device("cpu")
Work = Callable[[], None]
"""Work before a plan (casting inputs) or after it (writing buffers, updating parameters)."""


class StepProgram(Protocol):
    """A plan bound to the same tensors at every run."""

    plan: Plan

    def results(self) -> tuple[torch.Tensor, ...]:
        """Return the result tensors, the same ones for every run."""

    def finish_with(
        self,
        finish: Work,
        pack_gradients: Work | None = None,
        all_reduce: Work | None = None,
        *,
        on_device: bool = True,
    ) -> None:
        """Set the work after the plan: `pack_gradients`, and in runs that update parameters `all_reduce` and `finish`.

        `all_reduce` waits for other processes and is not part of any CUDA graph. Without it every run updates. `finish`
        is part of one if it is `on_device`.
        """

    def run(self, updates: bool = True) -> None:
        """Run one step on the current stream, up to the gradients or including the update of parameters."""


class KernelStep(PlanKernels):
    """The kernels of a step's plan; on a GPU one CUDA graph, which includes the optimizer's kernels."""

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
        """Work before the plan in every run."""
        self.finish: Work = _nothing
        """Work after the plan and the exchange of gradients."""
        self._pack_gradients: Work = _nothing
        self._all_reduce: Work | None = None
        self._as_graph = as_graph
        self._finishes_on_device = True
        self._phases: list[Work] = []

    def results(self) -> tuple[torch.Tensor, ...]:
        return self.outputs

    def finish_with(
        self,
        finish: Work,
        pack_gradients: Work | None = None,
        all_reduce: Work | None = None,
        *,
        on_device: bool = True,
    ) -> None:
        self.finish, self._pack_gradients, self._all_reduce = finish, pack_gradients or _nothing, all_reduce
        self._finishes_on_device = on_device
        self._phases = []

    def run(self, updates: bool = True) -> None:
        if not self._phases:
            self._phases = self._make_phases()
        if len(self._phases) == 1:
            self._phases[0]()
            return
        assert self._all_reduce is not None
        compute_gradients, finish = self._phases
        compute_gradients()
        if updates:
            self._all_reduce()
            finish()

    def _make_phases(self) -> list[Work]:
        """Return the work before and after the exchange of gradients, or all work in one if there is none."""
        if self._all_reduce is None:
            return [self._captured(self._run_all)]
        finish = self._captured(self.finish) if self._finishes_on_device else self.finish
        return [self._captured(self._compute_gradients), finish]

    def _captured(self, work: Work) -> Work:
        """Return the replay of a CUDA graph of the work; the work itself on the twin, and if there can be no graph."""
        if self._capture_stream is None or not self._as_graph:
            return work
        graph = self.graph_of(partial(_run_recorded, work), self._capture_stream)
        return work if graph is None else graph.replay

    def _compute_gradients(self) -> None:
        self.prepare()
        self.run_steps()
        self._pack_gradients()

    def _run_all(self) -> None:
        self._compute_gradients()
        self.finish()


class _HostStep:
    """A step that PyTorch computes on the CPU."""

    def __init__(self, plan: Plan, outputs: Iterable[torch.Tensor]) -> None:
        self.plan = plan
        self._outputs = tuple(outputs)
        self._pack_gradients: Work = _nothing
        self._epilogue: tuple[Work, ...] = ()

    def results(self) -> tuple[torch.Tensor, ...]:
        return self._outputs

    def finish_with(
        self,
        finish: Work,
        pack_gradients: Work | None = None,
        all_reduce: Work | None = None,
        *,
        on_device: bool = True,
    ) -> None:
        self._pack_gradients = pack_gradients or _nothing
        self._epilogue = tuple(work for work in (all_reduce, finish) if work is not None)

    def run(self, updates: bool = True) -> None:
        with own_arithmetic(self.plan.dtype, _HOST):
            for output, result in zip(self._outputs, self._compute(), strict=True):
                output.copy_(result)
        self._pack_gradients()
        for work in self._epilogue if updates else ():
            work()

    def _compute(self) -> Sequence[torch.Tensor]:
        """Return the plan's results."""
        raise NotImplementedError


class OperatorStep(_HostStep):
    """PyTorch's operators as they were captured, without the passes that are for kernels."""

    def __init__(
        self,
        plan: Plan,
        module: torch.fx.GraphModule,
        inputs: Sequence[torch.Tensor],
        kept: Sequence[int],
    ) -> None:
        """`kept` are the indices of the module's results that the plan also returns."""
        super().__init__(plan, (_output_buffer(plan, name) for name in plan.graph.outputs))
        self._module, self._inputs, self._kept = module, tuple(inputs), tuple(kept)

    def _compute(self) -> Sequence[torch.Tensor]:
        with reporting_errors("the training step"):
            results = self._module(*self._inputs)
        return [results[index] for index in self._kept]


class ReferenceStep(_HostStep):
    """A step's plan computed node by node: slow, to check plans and passes."""

    def __init__(
        self, plan: Plan, constants: ConstantCache, bound: Mapping[str, torch.Tensor], prepare: Work
    ) -> None:
        outputs = (
            torch.zeros_like(bound[name]) if name in bound else _output_buffer(plan, name)
            for name in plan.graph.outputs
        )
        super().__init__(plan, outputs)
        self._prepare, self._bound = prepare, bound
        self._constants = {entry: constants.get(entry, plan.graph) for entry in plan.constants}
        self._multi_output = MultiOutputCalls(plan, _HOST, everything=True)
        self._last = {
            name: number for number, step in enumerate(plan.steps) for name in step.node.inputs.values()
        }

    def _compute(self) -> Sequence[torch.Tensor]:
        graph = self.plan.graph
        kept = {*self._bound, *graph.outputs}
        values = dict(self._bound)
        self._prepare()
        for number, step in enumerate(self.plan.steps):
            inputs = {
                role: self._constants[step.constant(role)] if name in graph.constants else values[name]
                for role, name in step.node.inputs.items()
            }
            result = self._multi_output.compute(step.node, inputs)
            values[step.node.name] = result.to(self.plan.forms[step.node.name].dtype)
            for name in {name for name in step.node.inputs.values() if self._last[name] == number} - kept:
                values.pop(name, None)
        return [
            self._constants[ConstantForm(name, OWN)] if name in graph.constants else values[name]
            for name in graph.outputs
        ]


def _run_recorded(work: Work) -> tuple[()]:
    """Run work during capture; returns no graph nodes, since none is rebound later."""
    work()
    return ()


def _output_buffer(plan: Plan, name: str) -> torch.Tensor:
    if name in plan.graph.constants:
        return torch.zeros_like(plan.graph.constants[name])
    form = plan.forms[name]
    return form.view(torch.zeros(max(form.bytes, 1), dtype=torch.uint8, device="cpu"), 0)


def _nothing() -> None:
    pass
