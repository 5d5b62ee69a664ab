"""One kind of call, made ready: all that follows from shapes, strides, dtypes and settings is settled before.

What is left for a call is to allocate, to set pointers and to launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from escalade.device.recipe import Workspace
from escalade.ops.base.operation import Operation
from escalade.ops.base.problem import Problem
from escalade.ops.calling.executables import ALIGNMENT, Ready, ready

_ROOM_ALIGNMENT = 256  # bytes, of workspaces: as CUDA's own allocations
Setting = Callable[[int], object]
"""Sets the address of a buffer wherever it stands."""
Lay = Callable[[Any], Any]
"""A tensor as the kernel takes it: itself where it lies so already. It may make one for a tensor that is absent."""


@dataclass(frozen=True)
class Plan:
    """What an operator does for one kind of arguments."""

    prepared: Ready | None
    """What is launched; None where there is nothing to do."""
    outputs: Mapping[str, torch.Tensor]
    """Samples of what a call allocates, by buffer, on any device."""
    lay: Mapping[str, Lay] = field(default_factory=dict)
    """How inputs lie, by buffer; those that are not here are taken as they are."""
    results: tuple[str, ...] = ("y",)
    """The outputs that are returned."""
    finish: Callable[[Any], Any] | None = None
    """What is done with the result, or the tuple of them, at the end."""
    names: tuple[str, ...] = ()
    """The buffers of the tensors of a list, where the operator takes one."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """The buffers of arguments that are called otherwise."""


def launched(
    operation: Operation[Any],
    problem: Problem,
    device: torch.device,
    rung: str | None,
    elements: int | None = None,
) -> Ready | None:
    """What a plan launches: nothing where there are no images, or no elements if those are counted.

    A name that no rung has is wrong even then.
    """
    if problem.batch if elements is None else elements:
        return ready(operation, problem, device, rung)
    if rung is not None:
        operation.ladder.rung(rung)
    return None


def outputs(operation: Operation[Any], problem: Problem) -> dict[str, torch.Tensor]:
    """Samples of what an operation computes."""
    meta = torch.device("meta")
    return {"y": operation.output(problem, meta), **operation.further_outputs(problem, meta)}


class Call:
    """A plan that is carried out again and again, by the thread that has made it.

    `run` is given the arguments of the operator, those of a list one by one; some of them are tensors.
    """

    def __init__(
        self, plan: Plan, device: torch.device, buffers: Mapping[int, str], arguments: Sequence[Any]
    ) -> None:
        """`buffers` says which arguments are tensors; `arguments` are those of the first call."""
        self._prepared = plan.prepared
        self._device = device
        self.index = device.index if device.type == "cuda" else None
        """The GPU that has to be the current one; None for the CPU."""
        self._finish = plan.finish
        self._inputs = [
            (place, name, _needed(plan.lay.get(name), arguments[place])) for place, name in buffers.items()
        ]
        self._samples = {
            name: (tuple(sample.shape), sample.stride(), sample.dtype)
            for name, sample in plan.outputs.items()
        }
        self._results = [list(self._samples).index(name) for name in plan.results]
        self.run: Callable[[Sequence[Any]], Any] = self._first

    def _first(self, arguments: Sequence[Any]) -> Any:
        """Goes by the names of all buffers, so that one which is missing is noticed; the twin is always called so."""
        made = {
            name: torch.empty_strided(size, stride, dtype=dtype, device=self._device)
            for name, (size, stride, dtype) in self._samples.items()
        }
        prepared = self._prepared
        if prepared is not None:
            given = {
                name: _aligned(arguments[place] if lay is None else lay(arguments[place]))
                for place, name, lay in self._inputs
            }
            prepared.run({**given, **made})
            if prepared.executable.takes_pointers:
                present = [one for one in self._inputs if given[one[1]] is not None]
                self.run = self._by_pointers(prepared, present)
        return self._returned(list(made.values()))

    def _returned(self, made: Sequence[torch.Tensor]) -> Any:
        results = [made[place] for place in self._results]
        result = results[0] if len(results) == 1 else tuple(results)
        return result if self._finish is None else self._finish(result)

    def _by_pointers(
        self, prepared: Ready, present: Sequence[tuple[int, str, Lay | None]]
    ) -> Callable[[Sequence[Any]], Any]:
        """What a call does on a GPU once every buffer is known to be there: pointers are set where they stand."""
        inputs = [(place, lay, prepared.setting(name)) for place, name, lay in present]
        outputs = [(*sample, prepared.setting(name)) for name, sample in self._samples.items()]
        rooms = [
            (room, prepared.setting(room.name))
            for room in prepared.executable.recipe.workspaces
            if room.name not in self._samples
        ]
        counters = [(room, point) for room, point in rooms if room.zeroed]
        scratch, scratch_bytes = _one_behind_another([one for one in rooms if not one[0].zeroed])
        launch = prepared.executable.launcher()
        only = self._results[0] if len(self._results) == 1 and self._finish is None else None
        # What PyTorch's own compiled code allocates with: a third of the time of torch.empty_strided.
        allocate = torch._C._dynamo.guards._empty_strided_cuda  # type: ignore[attr-defined]

        def run(arguments: Sequence[Any]) -> Any:
            held = []  # copies and workspaces, until all is launched
            for place, lay, point in inputs:
                tensor = arguments[place]
                if lay is not None:
                    tensor = lay(tensor)
                    held.append(tensor)
                address = tensor.data_ptr()
                if address % ALIGNMENT:
                    tensor = tensor.clone()
                    held.append(tensor)
                    address = tensor.data_ptr()
                point(address)
            made = []
            for size, stride, dtype, point in outputs:
                tensor = allocate(size, stride, dtype)
                made.append(tensor)
                point(tensor.data_ptr())
            if scratch:
                tensor = allocate((scratch_bytes,), (1,), torch.uint8)
                held.append(tensor)
                base = tensor.data_ptr()
                for offset, point in scratch:
                    point(base + offset)
            for room, point in counters:
                tensor = prepared.zeroed(room)
                held.append(tensor)
                point(tensor.data_ptr())
            launch()
            return self._returned(made) if only is None else made[only]

        return run


def _one_behind_another(
    rooms: Sequence[tuple[Workspace, Setting]],
) -> tuple[list[tuple[int, Setting]], int]:
    """Where each workspace begins in memory that they share, and how many bytes that has."""
    places, end = [], 0
    for room, point in rooms:
        places.append((end, point))
        end += -(-room.bytes // _ROOM_ALIGNMENT) * _ROOM_ALIGNMENT
    return places, end


def _needed(lay: Lay | None, tensor: torch.Tensor | None) -> Lay | None:
    """None where a tensor of this kind lies as it should."""
    return None if lay is None or lay(tensor) is tensor else lay


def _aligned(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return tensor if tensor is None or tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()
