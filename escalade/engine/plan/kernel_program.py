"""Run a plan as kernels over its own arena; on a GPU as one CUDA graph."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import torch

from escalade.device.arguments import BufferPointers
from escalade.device.cuda import CudaLaunch
from escalade.device.graph import ChainedGraph, GraphNode, KernelGraph
from escalade.device.run import Executable
from escalade.device.strides import is_disjoint
from escalade.engine.plan.constants import ConstantCache
from escalade.engine.plan.io_binding import InputBinding, LaunchPointers, OutputBinding
from escalade.engine.plan.kernels import PlanKernels, report_out_of_memory
from escalade.engine.plan.memory import PlanValues
from escalade.engine.plan.plan import Plan
from escalade.engine.plan.program import OutTensors, Tensors, copy_into


def _to_dtype(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # `to` releases the GIL even when there is nothing to convert.
    return tensor if tensor.dtype is dtype else tensor.to(dtype)


def _copy_input(values: PlanValues, name: str, tensor: torch.Tensor) -> torch.Tensor:
    return values.at(name).copy_(tensor.detach(), non_blocking=True)


class _RebindablePointer:
    """A caller's input or output: pointer arguments of launches, and of their nodes in the CUDA graph."""

    def __init__(self, pointers: BufferPointers, graph: KernelGraph | None) -> None:
        self._pointers = pointers
        self._graph = graph

    def point(self, address: int) -> None:
        if self._pointers.point(address) and self._graph is not None:
            self._graph.change(self._pointers.launches)


class KernelProgram(PlanKernels):
    """The kernels of a plan; on a GPU one CUDA graph.

    A call points the kernels that read an input or write a result at the caller's tensors. Graph nodes are only updated
    when an address changed since the last call: PyTorch's caching allocator often returns the same one.
    """

    def __init__(
        self,
        plan: Plan,
        constants: ConstantCache,
        device: torch.device,
        weights_from: PlanKernels | None = None,
    ) -> None:
        super().__init__(plan, constants, device, weights_from=weights_from)
        with report_out_of_memory(plan, device):
            self._graph = None if self._capture_stream is None else self._capture(self._capture_stream)
            self._capture_stream = None  # returned for the next program to use
        self._pointers = LaunchPointers.of(self)
        self._outside_pointers = {
            name: _RebindablePointer(each, self._graph) for name, each in self._pointers.outside.items()
        }
        self._inputs = {
            name: InputBinding(plan.forms[name], device, self._outside_pointers[name].point)
            for name in plan.inputs_outside
        }
        self._bind_input = [
            self._inputs[each.name].bind
            if each.name in self._inputs
            else partial(_copy_input, self._values, each.name)
            for each in plan.graph.inputs
        ]
        self._outputs = {
            name: OutputBinding(plan.forms[name], device, self._outside_pointers[name].point)
            for name in plan.outputs_outside
        }
        self._values.release_outside()
        self._is_bound_to_own = False
        for call in self.calls:
            if isinstance(call, Executable):
                call.release()

    def clone(self) -> KernelProgram:
        return KernelProgram(self.plan, self._constants, self._device, weights_from=self)

    def call(self, tensors: Tensors, out: OutTensors = None) -> list[torch.Tensor]:
        bound_inputs, made = self._bind(tensors, out)
        self._replay()
        del bound_inputs
        return self._results(made, out)

    def call_isolated(self, tensors: Tensors, out: OutTensors = None) -> list[torch.Tensor]:
        own, counters = (self._values.arena, self._memory.persistent), self._pointers.counters
        self._values.set_arena(torch.empty_like(self._values.arena))
        fresh = {name: self.plan.persistent[name].allocate(self._device) for name in counters}
        self._memory.persistent = {**self._memory.persistent, **fresh}
        try:
            self._point_at_scratch()
            bound_inputs, made = self._bind(tensors, out)
            self.run_steps()
            del bound_inputs
            return self._results(made, out)
        finally:
            arena, self._memory.persistent = own
            self._values.set_arena(arena)
            self._point_at_scratch()

    def run(self) -> None:
        """Run over the program's own memory; on a GPU on the current stream."""
        self.bind_own_memory()
        self._replay()

    def bind_own_memory(self) -> None:
        if self._is_bound_to_own:
            return
        for name, end in self._outside_pointers.items():
            end.point(self._values.at(name).data_ptr())
        self._is_bound_to_own = True

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Keep the caching allocator from reusing our buffers while a replay on `stream` is in flight."""
        for tensor in (self._values.arena, *self.weights):
            tensor.record_stream(stream)

    def _bind(self, tensors: Tensors, out: OutTensors) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Return the bound inputs, to keep alive until the launches are enqueued, and the results that kernels write.

        Inputs that no kernel reads in place are copied into the arena.
        """
        self._is_bound_to_own = False
        bound_inputs = []  # a plain loop: a comprehension or a strict zip doubles the cost on this hot path
        for take, tensor in zip(self._bind_input, tensors):  # noqa: B905
            bound_inputs.append(take(tensor))
        if out is None:
            return bound_inputs, {name: each.allocate() for name, each in self._outputs.items()}
        wanted = dict(zip(self.plan.graph.outputs, out, strict=True))
        return bound_inputs, {
            name: each.bind(wanted[name]) if is_disjoint(wanted[name], tensors) else each.allocate()
            for name, each in self._outputs.items()
        }

    def _results(self, made: dict[str, torch.Tensor], out: OutTensors) -> list[torch.Tensor]:
        """Return the results in output order; those that no kernel wrote in place are copied out."""
        outputs = self.plan.graph.outputs
        if out is not None:
            return copy_into(out, [made[name] if name in made else self._output(name) for name in outputs])
        results = []
        for name, dtype in zip(outputs, self.plan.output_dtypes):  # noqa: B905
            if name in made:
                results.append(_to_dtype(made[name], dtype))
            else:
                results.append(self._output(name).to(dtype, copy=True))
        return results

    def _point_at_scratch(self) -> None:
        self._pointers.arena.point(self._values.arena.data_ptr())
        for name, pointers in self._pointers.counters.items():
            pointers.point(self._memory.persistent[name].data_ptr())

    def _replay(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self.run_steps()

    def _capture(self, stream: torch.cuda.Stream) -> KernelGraph | None:
        if not self.calls:  # all results are inputs, constants, or without elements
            return None
        with torch.cuda.device(self._device):
            chain = self._chain()
            graph = ChainedGraph(chain) if chain else self.graph_of(self._record, stream)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        return graph

    def _chain(self) -> list[CudaLaunch] | None:
        """Return the run's launches if it is nothing but kernels on one stream."""
        launches = [
            launch
            for call in self.calls
            for launch in (call.launches if isinstance(call, Executable) else [call])
        ]
        chain = [launch for launch in launches if isinstance(launch, CudaLaunch) and launch.is_on_main_lane]
        return chain if len(chain) == len(launches) else None

    def _record(self) -> list[GraphNode]:
        with ExitStack() as noting:
            nodes = [
                noting.enter_context(call.capture_nodes())
                for call in self.calls
                if isinstance(call, Executable)
            ]
            self.run_steps()
        return [node for found in nodes for node in found]
