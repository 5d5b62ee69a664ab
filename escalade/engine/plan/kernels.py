"""The kernels of a plan made ready on a device over an arena, weights packed: one launch after another."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from types import MappingProxyType

import torch

from escalade.device.cuda import architecture_of, index_of, load
from escalade.device.packing import Prepared
from escalade.device.precompilation import build_for_twin, precompile
from escalade.device.recipe import Recipe
from escalade.device.streams import own_stream
from escalade.engine.nodes.arithmetic import own_arithmetic
from escalade.engine.nodes.lowering import OWN
from escalade.engine.plan.constants import Constants
from escalade.engine.plan.memory import Memory
from escalade.engine.plan.multi_output import SeveralResults
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.step import ConstantForm, Step
from escalade.engine.plan.values import Values
from escalade.errors import OutOfMemory
from escalade.gc_pause import collected_later


class Kernels:
    """The kernels of a plan over its arena, weights packed: on the GPU, or on the twin for the CPU."""

    def __init__(
        self,
        plan: Plan,
        constants: Constants,
        device: torch.device,
        bound: Mapping[str, torch.Tensor] = MappingProxyType({}),
        like: Kernels | None = None,
    ) -> None:
        """`bound` are the tensors of a plan whose inputs are bound, dense and in the forms that it has for them. Packed
        weights are those of other kernels `like` these, if there are any."""
        self.plan = plan
        self._device = device
        self._shared = constants
        self._parts = SeveralResults(plan, device)
        with clear_about_memory(plan, device):
            arena = torch.empty(plan.arena_bytes, dtype=torch.uint8, device=device)
            self._values = Values(plan, arena, bound)
            self._is_packed = like is not None
            packed = {} if like is None else like._memory.lasting
            self._memory: Memory = Memory(plan, constants, self._values, device, packed)
            compile_together([plan], device)
            self._numbers = [number for number, step in enumerate(plan.steps) if step.runs]
            steps = [plan.steps[number] for number in self._numbers]
            with collected_later():
                self.calls = [self._call(step, behind) for step, behind in zip_longest(steps, steps[1:])]
            self._side = self._first_run() if device.type == "cuda" else None

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Inputs of the plan's own, not those of a call."""
        return tuple(self._values.at(given.name) for given in self.plan.graph.inputs)

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        """Outputs of the plan's own, not those of a call."""
        return tuple(self._output(name) for name in self.plan.graph.outputs)

    @property
    def weights(self) -> tuple[torch.Tensor, ...]:
        """Weights as the kernels read them, and counters: what lasts from call to call."""
        return (*self._memory.lasting.values(), *self._memory.constants.values())

    def run_steps(self) -> None:
        """Runs one launch after another."""
        for _, call in self.one_by_one():
            call()

    def one_by_one(self) -> Iterator[tuple[Step, Callable[[], None]]]:
        """The steps that do something, each with what runs it: once or more, before the next one is asked for."""
        for number, call in zip(self._numbers, self.calls, strict=True):
            yield self.plan.steps[number], call
            self._values.end(number)

    def at_home(self) -> None:
        """Sees to it that they run over memory of their own, as they do unless there are calls too."""

    def in_pytorch(self, step: Step) -> Callable[[], torch.Tensor]:
        """What PyTorch would do in the place of a step, over the same values, to give what a kernel behind it reads."""
        values, compute_result = self._values, self._computing(step)
        return lambda: values.formed(step.node.name, compute_result())

    def _computing(self, step: Step) -> Callable[[], torch.Tensor]:
        """PyTorch's operators for a node over the plan's values, at the plan's precision."""
        alone = Step(step.node)
        constants = {
            role: self._shared.get(alone.constant(role), self.plan.graph)
            for role, name in step.node.inputs.items()
            if name in self.plan.graph.constants
        }
        values = {role: name for role, name in step.node.inputs.items() if role not in constants}
        memory, parts, dtype, device = self._memory, self._parts, self.plan.dtype, self._device

        def call() -> torch.Tensor:
            given = {role: memory.as_stored(name) for role, name in values.items()}
            with own_arithmetic(dtype, device):
                return parts.compute(step.node, {**constants, **given})

        return call

    def _first_run(self) -> torch.cuda.Stream:
        """Loads everything, on a stream that a graph can be recorded on. When it is over, weights are packed, for
        every stream.
        """
        side = own_stream(self._device, computes=True)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(side):
            self._values.arena.zero_()
            self._values.outside.zero_()
            self.run_steps()
            side.synchronize()
        return side

    def _output(self, name: str) -> torch.Tensor:
        if name in self.plan.graph.constants:
            return self._memory.constants[ConstantForm(name, OWN)]
        return self._values.at(name)

    def _call(self, step: Step, behind: Step | None) -> Callable[[], None]:
        if step.recipe is None:
            return self._pytorch(step)
        assert step.lowered is not None
        prepared = Prepared(
            step.recipe,
            self._device,
            f"{step.node.source or step.node.name} ({step.lowered.problem.name})",
            weights_stay=step.has_weights_ready(self.plan.graph.constants),
            behind=behind.recipe if behind else None,
        )
        if self.plan.apart.keys().isdisjoint(step.node.inputs.values()):
            bind = prepared.executable.bind if self._is_packed else prepared.bind
            return bind(self._memory.of(step, step.recipe))
        return self._bound_late(step, step.recipe, prepared)

    def _bound_late(self, step: Step, recipe: Recipe, prepared: Prepared) -> Callable[[], None]:
        """Kernels that read what PyTorch's steps give: each run finds it, and may find it elsewhere than the last."""
        memory, is_packed = self._memory, self._is_packed

        def call() -> None:
            nonlocal is_packed
            tensors = memory.of(step, recipe)
            if not is_packed:
                prepared.pack(tensors)
                is_packed = True
            prepared.executable.bind(tensors)()
            prepared.executable.release()

        return call

    def _pytorch(self, step: Step) -> Callable[[], None]:
        values, compute_result = self._values, self._computing(step)
        return lambda: values.keep(step, compute_result())


@contextmanager
def clear_about_memory(plan: Plan, device: torch.device) -> Iterator[None]:
    """What does not fit is said in terms of the plan."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"this plan needs {plan.bytes / 2**20:.0f} MiB ({plan.arena_bytes / 2**20:.0f} for values, "
            f"{plan.constant_bytes / 2**20:.0f} for weights); {_left_of(device)}. Take a smaller batch"
        ) from error


def _left_of(device: torch.device) -> str:
    if device.type != "cuda":
        return "the CPU has less"
    free, total = torch.cuda.mem_get_info(device)
    return f"{device} has {free / 2**20:.0f} of {total / 2**20:.0f} MiB free"


def compile_together(plans: Sequence[Plan], device: torch.device) -> None:
    """What the cache does not have yet is compiled on all cores, and loaded while others are still being compiled;
    whoever fails says so when its step is made."""
    programs = tuple(dict.fromkeys(program for plan in plans for program in plan.programs))
    here = architecture_of(device)
    if here is None:
        build_for_twin(programs)
    else:
        precompile(programs, here, ready=lambda program: load(program, index_of(device)))
