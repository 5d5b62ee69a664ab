"""A plan made ready on a device over memory of its own: kernels, and on a GPU one CUDA graph of them all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import torch

from escalade.device.arguments import Pointers
from escalade.device.cuda import CudaLaunch
from escalade.device.graph import ChainedGraph, GraphNode, KernelGraph, RecordedGraph
from escalade.device.run import Executable
from escalade.device.strides import is_apart
from escalade.engine.plan.addresses import Addresses
from escalade.engine.plan.constants import Constants
from escalade.engine.plan.io_binding import Given, Made
from escalade.engine.plan.kernels import Kernels, clear_about_memory
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.program import Rooms, settled
from escalade.engine.plan.values import Values


def _of_type(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor, cast if it has to be: `to` gives the interpreter's lock away even if there is nothing to do."""
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _copied(values: Values, name: str, tensor: torch.Tensor) -> torch.Tensor:
    return values.at(name).copy_(tensor.detach(), non_blocking=True)


class _End:
    """An input or output of the caller's, to launches and to the graph that they are in."""

    def __init__(self, pointers: Pointers, graph: KernelGraph | None) -> None:
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
        with clear_about_memory(plan, device):
            self._graph = None if self._side is None else self._captured(self._side)
            self._side = None  # for whoever makes the next program
        self._addresses = Addresses.of(self)
        self._ends = {name: _End(each, self._graph) for name, each in self._addresses.outside.items()}
        self._given = {
            name: Given(plan.forms[name], device, self._ends[name].point) for name in plan.inputs_outside
        }
        self._takes = [
            self._given[each.name].take
            if each.name in self._given
            else partial(_copied, self._values, each.name)
            for each in plan.graph.inputs
        ]
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
    ) -> list[torch.Tensor]:
        taken, made = self._ends_of(tensors, rooms)
        self._replay()
        del taken
        return self._results(made, types, rooms)

    def apart(
        self, tensors: Sequence[torch.Tensor], types: Sequence[torch.dtype], rooms: Rooms = None
    ) -> list[torch.Tensor]:
        own, counters = (self._values.arena, self._memory.lasting), self._addresses.counters
        self._values.move(torch.empty_like(self._values.arena))
        fresh = {name: self.plan.lasting[name].allocate(self._device) for name in counters}
        self._memory.lasting = {**self._memory.lasting, **fresh}
        try:
            self._point_at_scratch()
            taken, made = self._ends_of(tensors, rooms)
            self.run_steps()
            del taken
            return self._results(made, types, rooms)
        finally:
            arena, self._memory.lasting = own
            self._values.move(arena)
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

    def _ends_of(
        self, tensors: Sequence[torch.Tensor], rooms: Rooms
    ) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Inputs or copies of them, which are to live until they are enqueued to be read, and results that kernels
        write where the caller has them. What no kernel reads there is copied."""
        self._is_at_home = False
        taken = []  # a loop, for a comprehension or a strict zip takes as long as what it does
        for take, tensor in zip(self._takes, tensors):  # noqa: B905
            taken.append(take(tensor))
        if rooms is None:
            return taken, {name: each.make() for name, each in self._made.items()}
        wanted = dict(zip(self.plan.graph.outputs, rooms, strict=True))
        return taken, {
            name: each.within(wanted[name]) if is_apart(wanted[name], tensors) else each.make()
            for name, each in self._made.items()
        }

    def _results(
        self, made: dict[str, torch.Tensor], types: Sequence[torch.dtype], rooms: Rooms
    ) -> list[torch.Tensor]:
        """The results, those that no kernel writes where the caller has them copied there."""
        outputs = self.plan.graph.outputs
        if rooms is not None:
            return settled(rooms, [made[name] if name in made else self._output(name) for name in outputs])
        results = []
        for name, dtype in zip(outputs, types):  # noqa: B905
            if name in made:
                results.append(_of_type(made[name], dtype))
            else:
                results.append(self._output(name).to(dtype, copy=True))
        return results

    def _point_at_scratch(self) -> None:
        self._addresses.arena.point(self._values.arena.data_ptr())
        for name, pointers in self._addresses.counters.items():
            pointers.point(self._memory.lasting[name].data_ptr())

    def _replay(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self.run_steps()

    def _captured(self, side: torch.cuda.Stream) -> KernelGraph | None:
        if not self.calls:  # all results are inputs, constants, or without elements
            return None
        with torch.cuda.device(self._device):
            chain = self._chain()
            graph = ChainedGraph(chain) if chain else RecordedGraph(self._recorded, side)
        torch.cuda.current_stream(self._device).wait_stream(side)
        return graph

    def _chain(self) -> list[CudaLaunch] | None:
        """All that a run does, if it is launches one behind the other."""
        launches = [
            launch
            for call in self.calls
            for launch in (call.launches if isinstance(call, Executable) else [call])
        ]
        chain = [launch for launch in launches if isinstance(launch, CudaLaunch) and launch.is_in_line]
        return chain if len(chain) == len(launches) else None

    def _recorded(self) -> list[GraphNode]:
        with ExitStack() as noting:
            nodes = [
                noting.enter_context(call.noting_nodes())
                for call in self.calls
                if isinstance(call, Executable)
            ]
            self.run_steps()
        return [node for found in nodes for node in found]
