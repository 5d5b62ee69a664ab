"""A plan run step by step over the caller's tensors: where PyTorch's steps read or write so much of the caller's that
copies, which a CUDA graph would need, take longer than launching each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import cached_property

import torch

from escalade.device.packing import Prepared
from escalade.device.recipe import Recipe
from escalade.device.strides import is_apart
from escalade.engine.graph.forms import STORAGE
from escalade.engine.graph.graph import Input
from escalade.engine.nodes.arithmetic import own_arithmetic
from escalade.engine.nodes.lowering import OWN
from escalade.engine.plan.constants import Constants
from escalade.engine.plan.kernel_program import KernelProgram
from escalade.engine.plan.kernels import compile_together
from escalade.engine.plan.memory import lasting
from escalade.engine.plan.multi_output import SeveralResults
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.program import Program, Rooms, settled
from escalade.engine.plan.step import ConstantForm, Step
from escalade.engine.plan.values import empty, in_form
from escalade.ops.base.card import Card

_STEP_US = 50.0
"""Microseconds, about, that the host takes for a step by itself."""
_Tensors = MutableMapping[str, torch.Tensor]
_Run = Callable[[_Tensors, Mapping[str, torch.Tensor]], torch.Tensor]
"""Gives a step's result, of the values so far and of what lasts from call to call."""


def pays_stepwise(plan: Plan, card: Card) -> bool:
    """Whether the copies of inputs and results that the plan would make as a CUDA graph take longer than its steps one
    by one."""
    steps = [step for step in plan.steps if step.runs]
    if not plan.fallbacks or any(form.pitch for form in plan.forms.values()):
        return False
    if any(step.beside is not None for step in plan.steps):
        return False
    if any(step.is_alias and step.node.inputs.keys() != {"x"} for step in plan.steps):
        return False  # values that lie within another
    ends = [given.name for given in plan.graph.inputs] + [
        name for name in plan.graph.outputs if name in plan.forms
    ]
    copied = sum(plan.forms[name].bytes for name in ends if name not in plan.outside)
    return card.microseconds(0, 2 * copied) > _STEP_US * len(steps)


class SteppedProgram:
    """The steps one after another, each value where PyTorch's allocator puts it, until its last reader."""

    def __init__(
        self, plan: Plan, constants: Constants, device: torch.device, like: SteppedProgram | None = None
    ) -> None:
        """Packed weights are those of another program `like` this, if there is one."""
        self.plan = plan
        self._device = device
        self._shared = constants
        self._constants = {entry: constants.get(entry, plan.graph) for entry in plan.constants}
        self._is_packed = like is not None
        self._lasting: dict[str, torch.Tensor] = lasting(plan, device, {} if like is None else like._lasting)
        compile_together([plan], device)
        self._images = {given.name for given in plan.graph.inputs}
        self._several = SeveralResults(plan, device)
        self._runs = [self._run(step) for step in plan.steps]
        self._ends = self._last_readers()
        if device.type == "cuda":  # weights are packed, for every stream
            torch.cuda.current_stream(device).synchronize()

    @cached_property
    def _own(self) -> Program:
        return KernelProgram(self.plan, self._shared, self._device)

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        return self._own.inputs

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        return self._own.outputs

    def run(self) -> None:
        self._own.run()

    def another(self) -> SteppedProgram:
        return SteppedProgram(self.plan, self._shared, self._device, like=self)

    def over(
        self,
        tensors: Sequence[torch.Tensor],
        types: Sequence[torch.dtype],
        rooms: Rooms = None,
    ) -> list[torch.Tensor]:
        return self._over(tensors, types, rooms, self._lasting)

    def apart(
        self, tensors: Sequence[torch.Tensor], types: Sequence[torch.dtype], rooms: Rooms = None
    ) -> list[torch.Tensor]:
        return self._over(tensors, types, rooms, lasting(self.plan, self._device, self._lasting))

    def used_on(self, stream: torch.cuda.Stream) -> None:
        for tensor in (*self._lasting.values(), *self._constants.values()):
            tensor.record_stream(stream)

    def _over(
        self,
        tensors: Sequence[torch.Tensor],
        types: Sequence[torch.dtype],
        rooms: Rooms,
        lasts: Mapping[str, torch.Tensor],
    ) -> list[torch.Tensor]:
        plan, given = self.plan, self.plan.graph.inputs
        values = {entry.name: self._given(entry, t) for entry, t in zip(given, tensors, strict=True)}
        with own_arithmetic(plan.dtype, self._device):
            for number, (step, run) in enumerate(zip(plan.steps, self._runs, strict=True)):
                values[step.node.name] = run(values, lasts)
                for name in self._ends.get(number, ()):
                    del values[name]
        if rooms is not None:
            results = [self._output(name, values) for name in plan.graph.outputs]
            # A result that is a view of an input is read after other results are written, maybe over that input.
            return settled(rooms, [one if is_apart(one, rooms) else one.clone() for one in results])
        others = {tensor.untyped_storage().data_ptr() for tensor in (*tensors, *self._constants.values())}
        results = []
        for name, dtype in zip(plan.graph.outputs, types, strict=True):
            result = self._output(name, values).to(dtype)
            if result.untyped_storage().data_ptr() in others:
                result = result.clone()
            others.add(result.untyped_storage().data_ptr())
            results.append(result)
        return results

    def _given(self, entry: Input, tensor: torch.Tensor) -> torch.Tensor:
        dtype = self.plan.forms[entry.name].dtype
        plain = tensor.detach().resolve_neg()
        return plain if plain.dtype is dtype else plain.to(dtype)

    def _output(self, name: str, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        if name in self.plan.graph.constants:
            return self._constants[ConstantForm(name, OWN)]
        return in_form(self.plan.forms[name], values[name])

    def _last_readers(self) -> dict[int, list[str]]:
        """The values that nobody reads behind the step of each number."""
        last = {given.name: -1 for given in self.plan.graph.inputs}
        for number, step in enumerate(self.plan.steps):
            last[step.node.name] = number
            last.update((name, number) for name in step.node.inputs.values() if name in last)
        ends: dict[int, list[str]] = {}
        for name, number in last.items():
            if name not in self.plan.graph.outputs:
                ends.setdefault(number, []).append(name)
        return ends

    def _run(self, step: Step) -> _Run:
        constants = {
            role: self._constants[step.constant(role)]
            for role, name in step.node.inputs.items()
            if name in self.plan.graph.constants
        }
        values = {role: name for role, name in step.node.inputs.items() if role not in constants}
        if step.recipe is None:
            return self._in_pytorch(step, constants, values)
        return self._by_kernels(step, step.recipe, constants, values)

    def _in_pytorch(self, step: Step, constants: _Tensors, roles: Mapping[str, str]) -> _Run:
        forms, stored = self.plan.forms, STORAGE[self.plan.dtype]
        form, several = forms[step.node.name], self._several
        others = {  # images that come in another type
            name
            for name in self._images.intersection(roles.values())
            if forms[name].dtype.is_floating_point and forms[name].dtype is not stored
            if not self.plan.graph.typed
        }

        def run(values: _Tensors, lasts: Mapping[str, torch.Tensor]) -> torch.Tensor:
            given = {
                role: values[name].to(stored) if name in others else values[name]
                for role, name in roles.items()
            }
            result = several.compute(step.node, {**constants, **given})
            return result if result.dtype is form.dtype else result.to(form.dtype)

        return run

    def _by_kernels(self, step: Step, recipe: Recipe, constants: _Tensors, roles: Mapping[str, str]) -> _Run:
        prepared = Prepared(
            recipe,
            self._device,
            step.node.source or step.node.name,
            weights_stay=step.has_weights_ready(self.plan.graph.constants),
        )
        forms, device = self.plan.forms, self._device
        kept = {workspace.name: step.workspace_name(workspace) for workspace in recipe.workspaces}
        if not self._is_packed:
            packed = {name: self._lasting[place] for name, place in kept.items() if place in self._lasting}
            prepared.pack({**constants, **packed})

        def run(values: _Tensors, lasts: Mapping[str, torch.Tensor]) -> torch.Tensor:
            for name in roles.values():
                values[name] = in_form(forms[name], values[name])
            result = empty(forms[step.node.name], device)
            tensors = {**constants, **{role: values[name] for role, name in roles.items()}, "y": result}
            for workspace in recipe.workspaces:
                there = lasts.get(kept[workspace.name])
                tensors[workspace.name] = workspace.allocate(device) if there is None else there
            prepared.executable.bind(tensors)()
            prepared.executable.release()
            return result

        return run
