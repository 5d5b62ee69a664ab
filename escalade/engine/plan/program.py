"""A plan made ready on a device over memory of its own: kernels, and on a GPU one CUDA graph of them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Protocol

import torch

from escalade.device.arguments import Pointers
from escalade.device.cuda import architecture_of
from escalade.device.graph import GraphNode, RecordedGraph
from escalade.device.packing import Prepared
from escalade.device.precompilation import build_for_twin, precompile
from escalade.device.recipe import Recipe
from escalade.device.run import Executable
from escalade.engine.graph.forms import STORAGE, Form
from escalade.engine.nodes.arithmetic import own_arithmetic
from escalade.engine.nodes.evaluate import compute
from escalade.engine.nodes.lowering import STORED
from escalade.engine.plan.caller import Given, Made, is_apart
from escalade.engine.plan.constants import Constants
from escalade.engine.plan.plan import ConstantForm, Plan, Step
from escalade.engine.plan.several import SeveralResults
from escalade.engine.plan.values import Values
from escalade.errors import OutOfMemory
from escalade.ops.base.dtypes import E4M3, to_e4m3

_HOST = torch.device("cpu")


Rooms = Sequence[torch.Tensor] | None
"""Where the caller wants the results, each of its size and type."""


class Program(Protocol):
    """What an engine runs, over the tensors of a call; or over its own: `inputs` are filled, then `run`, then `outputs`
    hold the results.
    """

    plan: Plan

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]: ...
    @property
    def outputs(self) -> tuple[torch.Tensor, ...]: ...
    def run(self) -> None: ...
    def over(
        self,
        tensors: Sequence[torch.Tensor],
        types: Sequence[torch.dtype],
        rooms: Rooms = None,
        is_idle: bool = False,
    ) -> list[torch.Tensor]:
        """Runs over these inputs; the results, of these types, are the caller's own, in the caller's rooms if there are
        any. `is_idle` says that no run is under way."""

    def apart(
        self, tensors: Sequence[torch.Tensor], types: Sequence[torch.dtype], rooms: Rooms
    ) -> list[torch.Tensor]:
        """Runs over these with nothing that other calls write: for a CUDA graph of the caller's, which may run at any
        time.
        """

    def another(self) -> Program:
        """A program of this plan over other buffers, with these weights: both may run at once."""

    def used_on(self, stream: torch.cuda.Stream) -> None: ...


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
        self._rooms: dict[str, dict[str, torch.Tensor]] = {}
        self._parts = SeveralResults(plan)
        with _clear_about_memory(plan, device):
            arena = torch.empty(plan.arena_bytes, dtype=torch.uint8, device=device)
            self._values = Values(plan, arena, bound)
            self._is_packed = like is not None
            self._lasting: dict[str, torch.Tensor] = lasting(
                plan, device, {} if like is None else like._lasting
            )
            self._constants = {entry: constants.get(entry, plan.graph) for entry in plan.constants}
            compile_together([plan], device)
            self._numbers = [number for number, step in enumerate(plan.steps) if step.runs]
            steps = [plan.steps[number] for number in self._numbers]
            self.calls = [
                self._call(step, behind) for step, behind in zip(steps, [*steps[1:], None], strict=True)
            ]
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
        return (*self._lasting.values(), *self._constants.values())

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
        compute_result = self._computing(step)
        return lambda: self._values.formed(step.node.name, compute_result())

    def _computing(self, step: Step) -> Callable[[], torch.Tensor]:
        """PyTorch's operators for a node over the plan's values, at the plan's precision."""
        alone = Step(step.node)
        constants = {
            role: self._shared.get(alone.constant(role), self.plan.graph)
            for role, name in step.node.inputs.items()
            if name in self.plan.graph.constants
        }
        values = {role: name for role, name in step.node.inputs.items() if role not in constants}

        def call() -> torch.Tensor:
            given = {role: self._as_stored(name) for role, name in values.items()}
            with own_arithmetic(self.plan.dtype, self._device):
                return self._parts.compute(step.node, {**constants, **given})

        return call

    def _as_stored(self, name: str) -> torch.Tensor:
        """A value for PyTorch, which multiplies numbers of one type: an image may have come in another."""
        value = self._values.at(name)
        if self.plan.graph.typed:
            return value
        is_image = any(name == given.name for given in self.plan.graph.inputs)
        return value.to(STORAGE[self.plan.dtype]) if is_image and value.is_floating_point() else value

    def _first_run(self) -> torch.cuda.Stream:
        """Loads everything, on a stream that a graph can be recorded on. When it is over, weights are packed, for
        every stream.
        """
        side = torch.cuda.Stream(self._device)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(side):
            self._values.arena.zero_()
            self._values.outside.zero_()
            self.run_steps()
            side.synchronize()
        return side

    def _output(self, name: str) -> torch.Tensor:
        if name in self.plan.graph.constants:
            return self._constants[ConstantForm(name, STORED)]
        return self._values.at(name)

    def _constants_of(self, step: Step) -> dict[str, torch.Tensor]:
        constants = self.plan.graph.constants
        return {
            role: self._constants[step.constant(role)]
            for role, name in step.node.inputs.items()
            if name in constants
        }

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
            return bind(self._tensors(step, step.recipe))
        return self._bound_late(step, step.recipe, prepared)

    def _tensors(self, step: Step, recipe: Recipe) -> dict[str, torch.Tensor]:
        """What a step's kernels read and write, where it lies now."""
        tensors = self._constants_of(step)
        tensors |= {
            role: self._values.dense(name) for role, name in step.node.inputs.items() if role not in tensors
        }
        tensors["y"] = self._values.at(step.node.name)
        tensors |= self._unread(step)
        tensors |= {
            buffer: self._values.at(name) for buffer, name in self.plan.beside(step.node.name).items()
        }
        for workspace in recipe.workspaces:
            name = step.workspace_name(workspace)
            if name in self._lasting:
                tensors[workspace.name] = self._lasting[name]
            else:
                offset = self.plan.places[name]
                tensors[workspace.name] = self._values.arena[offset : offset + workspace.bytes]
        return tensors

    def _unread(self, step: Step) -> dict[str, torch.Tensor]:
        """Room for what a step's kernels write besides its result, and nobody reads."""
        assert step.lowered is not None
        if step.node.name not in self._rooms:
            every = step.lowered.operation.further_outputs(step.lowered.problem, self._device)
            read = self.plan.beside(step.node.name)
            self._rooms[step.node.name] = {name: room for name, room in every.items() if name not in read}
        return self._rooms[step.node.name]

    def _bound_late(self, step: Step, recipe: Recipe, prepared: Prepared) -> Callable[[], None]:
        """Kernels that read what PyTorch's steps give: each run finds it, and may find it elsewhere than the last."""
        is_packed = self._is_packed

        def call() -> None:
            nonlocal is_packed
            tensors = self._tensors(step, recipe)
            if not is_packed:
                prepared.pack(tensors)
                is_packed = True
            prepared.executable.bind(tensors)()
            prepared.executable.release()

        return call

    def _pytorch(self, step: Step) -> Callable[[], None]:
        compute_result = self._computing(step)
        return lambda: self._values.keep(step, compute_result())


def _of_type(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor, cast if it has to be: `to` gives the interpreter's lock away even if there is nothing to do."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


@dataclass(frozen=True)
class Addresses:
    """Where addresses stand in the arguments of a plan's launches."""

    outside: Mapping[str, Pointers]
    """Pointers to inputs and outputs that lie in the caller's tensors, by name."""
    arena: Pointers
    counters: Mapping[str, Pointers]

    @staticmethod
    def of(kernels: Kernels) -> Addresses:
        plan = kernels.plan
        found = Addresses(
            {name: Pointers() for name in plan.outside.values()},
            Pointers(),
            {name: Pointers() for name, workspace in plan.lasting.items() if workspace.zeroed},
        )
        steps = (step for step in plan.steps if step.runs)
        for step, executable in zip(steps, kernels.calls, strict=True):
            if not isinstance(executable, Executable):
                continue
            for role, name in {
                **step.node.inputs,
                "y": step.node.name,
                **plan.beside(step.node.name),
            }.items():
                if name in plan.outside:
                    end = plan.outside[name]
                    executable.add_to(found.outside[end], role, plan.places[name] - plan.places[end])
                elif name not in plan.graph.constants:
                    executable.add_to(found.arena, role, plan.places[name])
            for workspace in executable.recipe.workspaces:
                name = step.workspace_name(workspace)
                if name in found.counters:
                    executable.add_to(found.counters[name], workspace.name)
                elif name not in plan.lasting:
                    executable.add_to(found.arena, workspace.name, plan.places[name])
        return found


class _End:
    """An input or output of the caller's, to launches and to the graph that they are in."""

    def __init__(self, pointers: Pointers, graph: RecordedGraph | None) -> None:
        self._pointers = pointers
        self._graph = graph

    def point(self, address: int) -> None:
        if self._pointers.point(address) and self._graph is not None:
            self._graph.change(self._pointers.launches)


class KernelProgram(Kernels):
    """The kernels of a plan; on the GPU one CUDA graph of them all.

    A call points those that read an input or write a result at the caller's tensors. Where they lie where they lay in
    the call before, as PyTorch's allocator often has it, there is nothing to do.
    """

    def __init__(
        self, plan: Plan, constants: Constants, device: torch.device, like: Kernels | None = None
    ) -> None:
        super().__init__(plan, constants, device, like=like)
        with _clear_about_memory(plan, device):
            self._graph = None if self._side is None else self._captured(self._side)
        self._addresses = Addresses.of(self)
        self._ends = {name: _End(each, self._graph) for name, each in self._addresses.outside.items()}
        self._given = {
            name: Given(plan.forms[name], device, self._ends[name].point) for name in plan.inputs_outside
        }
        self._made = {
            name: Made(plan.forms[name], device, self._ends[name].point) for name in plan.outputs_outside
        }
        self._values.forget_outside()
        self._is_at_home = False
        for call in self.calls:
            if isinstance(call, Executable):
                call.release()

    def another(self) -> KernelProgram:
        return KernelProgram(self.plan, self._shared, self._device, like=self)

    def over(
        self,
        tensors: Sequence[torch.Tensor],
        types: Sequence[torch.dtype],
        rooms: Rooms = None,
        is_idle: bool = False,
    ) -> list[torch.Tensor]:
        return self._call_over(tensors, types, rooms, partial(self._replay, is_idle))

    def apart(
        self, tensors: Sequence[torch.Tensor], types: Sequence[torch.dtype], rooms: Rooms = None
    ) -> list[torch.Tensor]:
        own, counters = (self._values.arena, self._lasting), self._addresses.counters
        self._values.arena = torch.empty_like(self._values.arena)
        fresh = {name: self.plan.lasting[name].allocate(self._device) for name in counters}
        self._lasting = {**self._lasting, **fresh}
        try:
            self._point_at_scratch()
            return self._call_over(tensors, types, rooms, self.run_steps)
        finally:
            self._values.arena, self._lasting = own
            self._point_at_scratch()

    def run(self) -> None:
        """Runs them over memory of their own; on the GPU on the current stream."""
        self.at_home()
        self._replay()

    def at_home(self) -> None:
        """Points the kernels at memory of their own, until the next call."""
        if self._is_at_home:
            return
        for name, end in self._ends.items():
            end.point(self._values.at(name).data_ptr())
        self._is_at_home = True

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """Whoever drops the program need not wait for it: its memory is not given away while the stream runs it."""
        for tensor in (self._values.arena, *self.weights):
            tensor.record_stream(stream)

    def _call_over(
        self,
        tensors: Sequence[torch.Tensor],
        types: Sequence[torch.dtype],
        rooms: Rooms,
        run: Callable[[], None],
    ) -> list[torch.Tensor]:
        """Copies what no kernel reads or writes where the caller has it. Inputs and copies of them live until they are
        enqueued to be read.
        """
        self._is_at_home = False
        alive = [
            self._take(given.name, tensor)
            for given, tensor in zip(self.plan.graph.inputs, tensors, strict=True)
        ]
        wanted = dict(zip(self.plan.graph.outputs, rooms or (), strict=rooms is not None))
        made = {
            name: each.within(wanted[name])
            if name in wanted and is_apart(wanted[name], tensors)
            else each.make()
            for name, each in self._made.items()
        }
        run()
        del alive
        outputs = self.plan.graph.outputs
        if rooms is not None:
            return settled(rooms, [made[name] if name in made else self._output(name) for name in outputs])
        return [
            _of_type(made[name], dtype) if name in made else self._output(name).to(dtype, copy=True)
            for name, dtype in zip(outputs, types, strict=True)
        ]

    def _take(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name in self._given:
            return self._given[name].take(tensor)
        return self._values.at(name).copy_(tensor.detach(), non_blocking=True)

    def _point_at_scratch(self) -> None:
        self._addresses.arena.point(self._values.arena.data_ptr())
        for name, pointers in self._addresses.counters.items():
            pointers.point(self._lasting[name].data_ptr())

    def _replay(self, is_idle: bool = False) -> None:
        if self._graph is not None:
            self._graph.replay(is_idle)
        else:
            self.run_steps()

    def _captured(self, side: torch.cuda.Stream) -> RecordedGraph:
        with torch.cuda.device(self._device):
            launches_only = all(isinstance(call, Executable) for call in self.calls)
            graph = RecordedGraph(self._recorded, side, launches_only=launches_only)
        torch.cuda.current_stream(self._device).wait_stream(side)
        return graph

    def _recorded(self) -> list[GraphNode]:
        with ExitStack() as noting:
            nodes = [
                noting.enter_context(call.noting_nodes())
                for call in self.calls
                if isinstance(call, Executable)
            ]
            self.run_steps()
        return [node for found in nodes for node in found]


def lasting(plan: Plan, device: torch.device, packed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Workspaces that keep what they hold: weights that are packed already, and new ones. Counters are always new."""
    return {
        name: packed[name] if name in packed and not each.zeroed else each.allocate(device)
        for name, each in plan.lasting.items()
    }


def settled(rooms: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The rooms with the results in them; those that were written there are there."""
    for room, result in zip(rooms, results, strict=True):
        if room is not result:
            room.copy_(result)
    return list(rooms)


@contextmanager
def _clear_about_memory(plan: Plan, device: torch.device) -> Iterator[None]:
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
    """What the cache does not have yet is compiled on all cores; whoever fails says so when its step is made."""
    programs = tuple(dict.fromkeys(program for plan in plans for program in plan.programs))
    here = architecture_of(device)
    if here is None:
        build_for_twin(programs)
    else:
        precompile(programs, here)


class ReferenceProgram:
    """A plan with PyTorch doing every node: what an engine on the CPU runs.

    Values are rounded to the plan's type after every node, sums are fp32's.
    """

    def __init__(self, plan: Plan, constants: Constants) -> None:
        self.plan = plan
        self._constants = {entry: _wide(constants.get(entry, plan.graph)) for entry in plan.constants}
        self.inputs = self._inputs()
        self.outputs = tuple(self._room(name) for name in plan.graph.outputs)

    def run(self) -> None:
        settled(self.outputs, self._results(self.inputs))

    def _results(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """In the plan's types; it shares nothing that is written with another run."""
        graph = self.plan.graph
        with own_arithmetic(self.plan.dtype, _HOST):
            values = {
                given.name: tensor.float() if getattr(torch, given.dtype).is_floating_point else tensor
                for given, tensor in zip(graph.inputs, inputs, strict=True)
            }
            for step in self.plan.steps:
                read = {
                    role: self._constants[step.constant(role)] if name in graph.constants else values[name]
                    for role, name in step.node.inputs.items()
                }
                result = compute(step.node, read)
                values[step.node.name] = _wide(_rounded(result, self.plan.forms[step.node.name]))
            return [
                self._constants[ConstantForm(name, STORED)] if name in graph.constants else values[name]
                for name in graph.outputs
            ]

    def over(
        self,
        tensors: Sequence[torch.Tensor],
        types: Sequence[torch.dtype],
        rooms: Rooms = None,
        is_idle: bool = False,
    ) -> list[torch.Tensor]:
        inputs = self._inputs()
        for given, tensor in zip(inputs, tensors, strict=True):
            given.copy_(tensor.detach())
        results = self._results(inputs)
        if rooms is not None:
            return settled(rooms, results)
        names = self.plan.graph.outputs
        made = settled(
            [self._room(name) for name in names], results
        )  # PyTorch may have them in another layout
        return [
            result.to(dtype, copy=name in self.plan.graph.constants)
            for name, result, dtype in zip(names, made, types, strict=True)
        ]

    apart = over

    def another(self) -> ReferenceProgram:
        """Is this one, which shares nothing between its runs over the tensors of calls."""
        return self

    def _inputs(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._room(given.name) for given in self.plan.graph.inputs)

    def used_on(self, stream: torch.cuda.Stream) -> None:
        """Does nothing: nothing here is on a GPU."""

    def _room(self, name: str) -> torch.Tensor:
        if name in self.plan.graph.constants:
            return self._constants[ConstantForm(name, STORED)]
        form = replace(self.plan.forms[name], pitch=0)  # nothing lies within another here
        return form.view(torch.zeros(max(form.bytes, 1), dtype=torch.uint8, device=_HOST), 0)


def _rounded(tensor: torch.Tensor, form: Form) -> torch.Tensor:
    return to_e4m3(tensor) if form.dtype == E4M3 else tensor.to(form.dtype)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Sums of 16-bit products in 16 bits are not what a GPU does."""
    return tensor.float() if tensor.is_floating_point() else tensor
