"""Prepare a plan's kernels on a device: compile them, pack weights, and bind them to an arena."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import zip_longest
from types import MappingProxyType

import torch

from escalade.device.cuda import architecture_of, index_of, load
from escalade.device.graph import CapturedGraph, GraphNode, KernelGraph
from escalade.device.packing import PreparedRecipe
from escalade.device.precompilation import build_for_twin, compile_seconds, precompile, uncompiled
from escalade.device.program import Program
from escalade.device.recipe import Recipe
from escalade.device.streams import dedicated_stream
from escalade.engine.nodes.evaluate import own_arithmetic
from escalade.engine.nodes.lowering import OWN
from escalade.engine.nodes.recurrent import pack_weights
from escalade.engine.plan.constants import ConstantCache
from escalade.engine.plan.memory import PlanMemory, PlanValues, repack
from escalade.engine.plan.plan import ConstantForm, Plan, PlanStep
from escalade.engine.plan.program import MultiOutputCalls
from escalade.errors import CompileError, EscaladeError, OutOfMemory
from escalade.gc_pause import gc_paused
from escalade.terminal_text import counted, format_duration

logger = logging.getLogger("escalade")

_LONG_SECONDS = 5.0
"""Builds that take less are not announced."""


class PlanKernels:
    """The kernels of a plan bound to its arena, with packed weights: on the GPU, or on the twin for the CPU."""

    def __init__(
        self,
        plan: Plan,
        constants: ConstantCache,
        device: torch.device,
        bound: Mapping[str, torch.Tensor] = MappingProxyType({}),
        weights_from: PlanKernels | None = None,
    ) -> None:
        """Read the inputs in `bound` from these tensors, dense and in the plan's forms.

        Packed weights are shared with `weights_from`, kernels of the same plan.
        """
        self.plan = plan
        self._device = device
        self._constants = constants
        self._multi_output = MultiOutputCalls(plan, device)
        with report_out_of_memory(plan, device):
            arena = torch.empty(plan.arena_bytes, dtype=torch.uint8, device=device)
            self._values = PlanValues(plan, arena, bound)
            self._is_packed = weights_from is not None
            packed = {} if weights_from is None else weights_from._memory.persistent
            self._memory: PlanMemory = PlanMemory(plan, constants, self._values, device, packed)
            compile_plans([plan], device)
            self._numbers = [number for number, step in enumerate(plan.steps) if step.runs]
            steps = [plan.steps[number] for number in self._numbers]
            with gc_paused():
                self.calls = [self._call(step, after) for step, after in zip_longest(steps, steps[1:])]
            self._capture_stream = self._first_run() if device.type == "cuda" else None

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The plan's own input buffers, not those of a call."""
        return tuple(self._values.at(entry.name) for entry in self.plan.graph.inputs)

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        """The plan's own output buffers, not those of a call."""
        return tuple(self._output(name) for name in self.plan.graph.outputs)

    @property
    def weights(self) -> tuple[torch.Tensor, ...]:
        """Packed weights, constants and counters: everything kept from call to call."""
        return (*self._memory.persistent.values(), *self._memory.constants.values())

    def repack(self) -> None:
        """Pack the weights again after the constants were written to."""
        self.repacking()()

    def repacking(self) -> Callable[[], None]:
        """Return `repack` as a function that does not keep the arena alive."""
        return partial(repack, self.plan, self._memory.constants, self._memory.persistent, self._device)

    def run_steps(self) -> None:
        """Run every step on the current stream, without a CUDA graph."""
        for _, call in self.iter_steps():
            call()

    def iter_steps(self) -> Iterator[tuple[PlanStep, Callable[[], None]]]:
        """Yield each step that runs with its callable, to be called at least once before the iterator advances."""
        for number, call in zip(self._numbers, self.calls, strict=True):
            yield self.plan.steps[number], call
            self._values.release_after(number)

    def graph_of(
        self, record: Callable[[], Iterable[GraphNode]], stream: torch.cuda.Stream
    ) -> KernelGraph | None:
        """Return a CUDA graph of what `record` enqueues; None if operators of PyTorch cannot be part of one."""
        try:
            return CapturedGraph(record, stream)
        except (EscaladeError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:  # of an operator that waits for the GPU, as in torch.linalg
            operators = dict.fromkeys(
                step.node.source or step.node.name for step in self.plan.steps if step.in_pytorch
            )
            if not operators:
                raise
            warnings.warn(
                f"operators of PyTorch in this plan ({', '.join(operators)}) cannot be part of a CUDA graph "
                f"({str(error).partition(chr(10))[0]}), so all steps are launched one by one",
                stacklevel=2,
            )
            return None

    def bind_own_memory(self) -> None:
        """Point the kernels at their own memory. They always are here; subclasses rebind them per call."""

    def pytorch_call(self, step: PlanStep) -> Callable[[], torch.Tensor]:
        """Return a callable that computes a step with PyTorch, in the form that the kernels after it read."""
        values, compute = self._values, self._pytorch_function(step)
        return lambda: values.to_form(step.node.name, compute())

    def _pytorch_function(self, step: PlanStep) -> Callable[[], torch.Tensor]:
        """Return a callable for PyTorch's operators of a node on the plan's values, at the plan's precision."""
        without_kernel = PlanStep(step.node)
        constants = {
            role: self._constants.get(without_kernel.constant(role), self.plan.graph)
            for role, name in step.node.inputs.items()
            if name in self.plan.graph.constants
        }
        pack_weights(step.node, self.plan.graph, constants)
        values = {role: name for role, name in step.node.inputs.items() if role not in constants}
        # Locals instead of `self`: the callable must not keep the program alive (see memory.py).
        memory, multi_output, dtype, device = self._memory, self._multi_output, self.plan.dtype, self._device

        def call() -> torch.Tensor:
            inputs = {role: memory.as_stored(name) for role, name in values.items()}
            with own_arithmetic(dtype, device):
                return multi_output.compute(step.node, {**constants, **inputs})

        return call

    def _first_run(self) -> torch.cuda.Stream:
        """Prepare all steps on a stream that supports graph capture. Afterwards weights are packed for use on
        every stream.
        """
        stream = dedicated_stream(self._device, computes=True)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            self._values.arena.zero_()
            self._values.outside.zero_()
            self.run_steps()
            stream.synchronize()
        return stream

    def _output(self, name: str) -> torch.Tensor:
        if name in self.plan.graph.constants:
            return self._memory.constants[ConstantForm(name, OWN)]
        return self._values.at(name)

    def _call(self, step: PlanStep, following: PlanStep | None) -> Callable[[], None]:
        if step.recipe is None:
            return self._pytorch(step)
        assert step.lowered is not None
        prepared = PreparedRecipe(
            step.recipe,
            self._device,
            f"{step.node.source or step.node.name} ({step.lowered.problem.name})",
            weights_are_constant=step.weights_are_constant(self.plan.graph.constants),
            behind=following.recipe if following else None,
        )
        if self.plan.pytorch_owned.keys().isdisjoint(step.node.inputs.values()):
            bind = prepared.executable.bind if self._is_packed else prepared.bind
            return bind(self._memory.of(step, step.recipe))
        return self._late_bound_call(step, step.recipe, prepared)

    def _late_bound_call(
        self, step: PlanStep, recipe: Recipe, prepared: PreparedRecipe
    ) -> Callable[[], None]:
        """Return a callable that binds its kernels at each run: results of PyTorch steps move from run to run."""
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

    def _pytorch(self, step: PlanStep) -> Callable[[], None]:
        values, compute = self._values, self._pytorch_function(step)
        return lambda: values.store(step, compute())


@contextmanager
def report_out_of_memory(plan: Plan, device: torch.device) -> Iterator[None]:
    """Re-raise PyTorch's out-of-memory error with the plan's own figures."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"this plan needs {plan.bytes / 2**20:.0f} MiB ({plan.arena_bytes / 2**20:.0f} for values, "
            f"{plan.constant_bytes / 2**20:.0f} for weights); {_free_memory(device)}. Use a smaller batch"
        ) from error


def _free_memory(device: torch.device) -> str:
    if device.type != "cuda":
        return "the CPU has less"
    free, total = torch.cuda.mem_get_info(device)
    return f"{device} has {free / 2**20:.0f} of {total / 2**20:.0f} MiB free"


def compile_plans(plans: Sequence[Plan], device: torch.device) -> None:
    """Compile the programs that are not cached on all cores, loading each as soon as it is built.

    A compile error is reported later, when the step that needs the program is prepared.
    """
    programs = tuple(dict.fromkeys(program for plan in plans for program in plan.programs))
    here = architecture_of(device)
    if here is None:
        _announce_build(programs)
        build_for_twin(programs)
    else:
        precompile(programs, here, ready=lambda program: load(program, index_of(device)))


def _announce_build(programs: Sequence[Program]) -> None:
    """Log how many kernels are built for the twin, and about how long that takes, unless it is short."""
    new = len(uncompiled(programs, None))
    seconds = compile_seconds(new, None)
    if seconds >= _LONG_SECONDS:
        logger.warning(
            "building %s for the twin, about %s; later runs find them in the cache. device='cpu' needs none",
            counted(new, "kernel"),
            format_duration(seconds),
        )


def avoid_failed(plan: Plan, error: CompileError, avoid: frozenset[str]) -> frozenset[str]:
    """Return the rungs to avoid after a kernel did not compile; raises the error if no other rung would help."""
    failed = _failing_rung(plan, error)
    if failed is None or failed in avoid:
        raise error
    logger.warning("%s did not compile; using the next rung instead. %s", failed, error)
    return avoid | {failed}


def _failing_rung(plan: Plan, error: CompileError) -> str | None:
    """Return the rung whose program a compile error names."""
    for step in plan.steps:
        if not (step.recipe and step.choice and step.lowered):
            continue
        if any(str(program) in str(error) for program in step.recipe.programs):
            return f"{step.lowered.operation.name}/{step.choice.rung.name}"
    return None
