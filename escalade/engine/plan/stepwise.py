"""Run a plan step by step on the caller's tensors, without a CUDA graph.

A graph needs copies of the inputs and results that PyTorch steps use. For large ones those copies take longer than
launching each step from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from functools import cached_property

import torch

from escalade.device.packing import PreparedRecipe
from escalade.device.recipe import Recipe
from escalade.device.strides import is_disjoint
from escalade.engine.graph.forms import STORAGE
from escalade.engine.graph.graph import Input
from escalade.engine.nodes.evaluate import own_arithmetic
from escalade.engine.nodes.lowering import OWN
from escalade.engine.nodes.recurrent import pack_weights
from escalade.engine.plan.constants import ConstantCache
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.engine.plan.kernels import compile_plans
from escalade.engine.plan.memory import allocate_persistent, empty_form, repack, to_form
from escalade.engine.plan.plan import ConstantForm, Plan, PlanStep
from escalade.engine.plan.program import (
    BufferedProgram,
    MultiOutputCalls,
    OutTensors,
    PlanProgram,
    Tensors,
    copy_into,
)
from escalade.ops.base.card import Card

_HOST_US_PER_STEP = 50.0
"""Approximate host time to launch one step."""
_Tensors = MutableMapping[str, torch.Tensor]
_StepCall = Callable[[_Tensors, Mapping[str, torch.Tensor]], torch.Tensor]
"""Computes a step's result from the values so far and the persistent workspaces."""


def program_for(plan: Plan, constants: ConstantCache, device: torch.device) -> BufferedProgram:
    """Return the faster program of a plan for calls."""
    kind = StepwiseProgram if is_faster_stepwise(plan, Card.of(device)) else KernelProgram
    return kind(plan, constants, device)


def is_faster_stepwise(plan: Plan, card: Card) -> bool:
    """Return True if the copies that a CUDA graph needs take longer than launching the steps one by one."""
    steps = [step for step in plan.steps if step.runs]
    # Without PyTorch steps a CUDA graph reads and writes the caller's tensors, without copies. Here every value is a
    # dense tensor of its own, so plans with pitches, side outputs or subbuffers cannot run.
    if not plan.fallbacks or any(form.pitch for form in plan.forms.values()):
        return False
    if any(step.side_output is not None for step in plan.steps):
        return False
    if any(step.is_alias and step.node.inputs.keys() != {"x"} for step in plan.steps):
        return False  # subbuffers
    names = [entry.name for entry in plan.graph.inputs]
    names += [name for name in plan.graph.outputs if name in plan.forms]
    copied = sum(plan.forms[name].bytes for name in names if name not in plan.outside)
    return card.microseconds(0, 2 * copied) > _HOST_US_PER_STEP * len(steps)


class StepwiseProgram:
    """The steps one after another; every value comes from PyTorch's allocator and is freed after its last reader."""

    def __init__(
        self,
        plan: Plan,
        constants: ConstantCache,
        device: torch.device,
        weights_from: StepwiseProgram | None = None,
    ) -> None:
        """Share packed weights with `weights_from`, another program of the same plan."""
        self.plan = plan
        self._device = device
        self._constant_cache = constants
        self._constants = {entry: constants.get(entry, plan.graph) for entry in plan.constants}
        self._is_packed = weights_from is not None
        self._persistent: dict[str, torch.Tensor] = allocate_persistent(
            plan, device, {} if weights_from is None else weights_from._persistent
        )
        compile_plans([plan], device)
        self._input_names = {entry.name for entry in plan.graph.inputs}
        self._multi_output = MultiOutputCalls(plan, device)
        self._step_calls = [self._make_step(step) for step in plan.steps]
        self._release_after = self._values_to_release()
        if device.type == "cuda":  # calls on other streams read the packed weights
            torch.cuda.current_stream(device).synchronize()

    @cached_property
    def _graph_program(self) -> PlanProgram:
        return KernelProgram(self.plan, self._constant_cache, self._device)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self._graph_program.inputs

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        return self._graph_program.outputs

    def run(self) -> None:
        self._graph_program.run()

    def clone(self) -> StepwiseProgram:
        return StepwiseProgram(self.plan, self._constant_cache, self._device, weights_from=self)

    def call(self, tensors: Tensors, out: OutTensors = None) -> list[torch.Tensor]:
        return self._call(tensors, out, self._persistent)

    def call_isolated(self, tensors: Tensors, out: OutTensors = None) -> list[torch.Tensor]:
        return self._call(tensors, out, allocate_persistent(self.plan, self._device, self._persistent))

    def repack(self) -> None:
        repack(self.plan, self._constants, self._persistent, self._device)
        if "_graph_program" in vars(self):
            self._graph_program.repack()

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        for tensor in (*self._persistent.values(), *self._constants.values()):
            tensor.record_stream(stream)

    def _call(
        self, tensors: Tensors, out: OutTensors, persistent: Mapping[str, torch.Tensor]
    ) -> list[torch.Tensor]:
        plan, entries = self.plan, self.plan.graph.inputs
        values = {
            entry.name: self._prepare_input(entry, t) for entry, t in zip(entries, tensors, strict=True)
        }
        with own_arithmetic(plan.dtype, self._device):
            for number, (step, run) in enumerate(zip(plan.steps, self._step_calls, strict=True)):
                values[step.node.name] = run(values, persistent)
                for name in self._release_after.get(number, ()):
                    del values[name]
        if out is not None:
            results = [self._output(name, values) for name in plan.graph.outputs]
            # A result that is a view of an input must be read before another result overwrites that input.
            return copy_into(out, [one if is_disjoint(one, out) else one.clone() for one in results])
        # Callers may write to results: these must not share memory with inputs, weights or each other.
        others = {tensor.untyped_storage().data_ptr() for tensor in (*tensors, *self._constants.values())}
        results = []
        for name, dtype in zip(plan.graph.outputs, plan.output_dtypes, strict=True):
            result = self._output(name, values).to(dtype)
            if result.untyped_storage().data_ptr() in others:
                result = result.clone()
            others.add(result.untyped_storage().data_ptr())
            results.append(result)
        return results

    def _prepare_input(self, entry: Input, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self.plan.forms[entry.name].dtype
        plain = tensor.detach().resolve_neg()
        return plain if plain.dtype is dtype else plain.to(dtype)

    def _output(self, name: str, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if name in self.plan.graph.constants:
            return self._constants[ConstantForm(name, OWN)]
        return to_form(self.plan.forms[name], values[name])

    def _values_to_release(self) -> dict[int, list[str]]:
        """Return the values whose last reader is each step, by its number."""
        last = {entry.name: -1 for entry in self.plan.graph.inputs}
        for number, step in enumerate(self.plan.steps):
            last[step.node.name] = number
            last.update((name, number) for name in step.node.inputs.values() if name in last)
        ends: dict[int, list[str]] = {}
        for name, number in last.items():
            if name not in self.plan.graph.outputs:
                ends.setdefault(number, []).append(name)
        return ends

    def _make_step(self, step: PlanStep) -> _StepCall:
        constants = {
            role: self._constants[step.constant(role)]
            for role, name in step.node.inputs.items()
            if name in self.plan.graph.constants
        }
        pack_weights(step.node, self.plan.graph, constants)
        values = {role: name for role, name in step.node.inputs.items() if role not in constants}
        if step.recipe is None:
            return self._pytorch_step(step, constants, values)
        return self._kernel_step(step, step.recipe, constants, values)

    def _pytorch_step(self, step: PlanStep, constants: _Tensors, roles: Mapping[str, str]) -> _StepCall:
        forms, stored = self.plan.forms, STORAGE[self.plan.dtype]
        form, multi_output = forms[step.node.name], self._multi_output
        cast = {  # inputs in another dtype: PyTorch's operators need one for all
            name
            for name in self._input_names.intersection(roles.values())
            if forms[name].dtype.is_floating_point and forms[name].dtype is not stored
            if not self.plan.graph.typed
        }

        def run(values: _Tensors, persistent: Mapping[str, torch.Tensor]) -> torch.Tensor:
            inputs = {
                role: values[name].to(stored) if name in cast else values[name]
                for role, name in roles.items()
            }
            result = multi_output.compute(step.node, {**constants, **inputs})
            return result if result.dtype is form.dtype else result.to(form.dtype)

        return run

    def _kernel_step(
        self, step: PlanStep, recipe: Recipe, constants: _Tensors, roles: Mapping[str, str]
    ) -> _StepCall:
        prepared = PreparedRecipe(
            recipe,
            self._device,
            step.node.source or step.node.name,
            weights_are_constant=step.weights_are_constant(self.plan.graph.constants),
        )
        forms, device = self.plan.forms, self._device
        full_names = {workspace.name: step.workspace_name(workspace) for workspace in recipe.workspaces}
        if not self._is_packed:
            packed = {
                name: self._persistent[full] for name, full in full_names.items() if full in self._persistent
            }
            prepared.pack({**constants, **packed})

        def run(values: _Tensors, persistent: Mapping[str, torch.Tensor]) -> torch.Tensor:
            for name in roles.values():
                values[name] = to_form(forms[name], values[name])
            result = empty_form(forms[step.node.name], device)
            tensors = {**constants, **{role: values[name] for role, name in roles.items()}, "y": result}
            for workspace in recipe.workspaces:
                kept = persistent.get(full_names[workspace.name])
                tensors[workspace.name] = workspace.allocate(device) if kept is None else kept
            prepared.executable.bind(tensors)()
            prepared.executable.release()
            return result

        return run
