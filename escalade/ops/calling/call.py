"""One kind of call, made ready: all that follows from shapes, strides, dtypes and settings is settled before.

What is left for a call is to allocate, to set pointers and to launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from escalade.device.recipe import Workspace
from escalade.device.strides import ALIGNMENT, aligned
from escalade.device.torch_private import FAST_PATHS
from escalade.ops.base.operation import Operation
from escalade.ops.base.problem import Problem
from escalade.ops.calling.call_codegen import Source
from escalade.ops.calling.executables import Ready, ready

_ROOM_ALIGNMENT = 256  # bytes, of workspaces: as CUDA's own allocations
Function = Callable[..., Any]
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
        self._by_pointers = False
        self.arguments = len(arguments)
        self.run: Function = self._by_names

    def _by_names(self, arguments: Sequence[Any]) -> Any:
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
            if prepared.executable.supports_pointer_updates:
                self._inputs = [one for one in self._inputs if given[one[1]] is not None]
                self._by_pointers = True
                source = Source()
                source.add(self.unpacked("arguments"))
                source.add(f"return {self.write(source)}")
                self.run = source.function("run", ["arguments"])
        tensors = list(made.values())
        results = [tensors[place] for place in self._results]
        result = results[0] if len(results) == 1 else tuple(results)
        return result if self._finish is None else self._finish(result)

    @property
    def names(self) -> list[str]:
        """What the lines of `write` call the arguments."""
        return [f"a{place}" for place in range(self.arguments)]

    def unpacked(self, sequence: str) -> str:
        """A line that gives the arguments in a sequence these names."""
        return f"{', '.join(self.names)}, = {sequence}"

    def write(self, source: Source) -> str:
        """Writes what a call does, in lines that have the arguments under `names`; what is left stands for its result.

        On a GPU, where every buffer is known to be there once it has run, pointers are set where they stand.
        """
        prepared = self._prepared
        if prepared is None or not self._by_pointers:
            return f"{source.name(self.run)}(({', '.join(self.names)},))"
        add, name = source.add, source.name
        allocate = name(FAST_PATHS.allocator(self._device))
        for place, _, lay in self._inputs:
            add(f"t{place} = a{place}" if lay is None else f"t{place} = {name(lay)}(a{place})")
        taken = [place for place, _, _ in self._inputs]
        pointers = [f"p{place} = t{place}.data_ptr()" for place in taken]
        add(*pointers, f"if ({' | '.join(f'p{place}' for place in taken)}) % {ALIGNMENT}:")
        add(*[f"    t{place} = {name(_aligned)}(t{place})" for place in taken])
        add(*[f"    {line}" for line in pointers])
        for place, buffer, _ in self._inputs:
            add(_set(source, prepared, buffer, f"p{place}"))
        for number, (buffer, sample) in enumerate(self._samples.items()):
            add(f"y{number} = {allocate}({', '.join(map(name, sample))})")
            add(_set(source, prepared, buffer, f"y{number}.data_ptr()"))
        rooms = [room for room in prepared.executable.recipe.workspaces if room.name not in self._samples]
        self._write_workspaces(source, prepared, allocate, rooms)
        add(f"{name(prepared.executable.launcher())}()")
        results = [f"y{place}" for place in self._results]
        result = results[0] if len(results) == 1 else f"({', '.join(results)})"
        return result if self._finish is None else f"{name(self._finish)}({result})"

    def _write_workspaces(
        self, source: Source, prepared: Ready, allocate: str, rooms: Sequence[Workspace]
    ) -> None:
        """They stay until all is launched: their names are those of a function that is running."""
        places, size = _one_behind_another([room for room in rooms if not room.zeroed])
        if size:
            source.add(f"scratch = {allocate}(({size},), (1,), {source.name(torch.uint8)})")
            source.add("base = scratch.data_ptr()")
        for buffer, offset in places.items():
            source.add(_set(source, prepared, buffer, f"base + {offset}"))
        for number, room in enumerate(room for room in rooms if room.zeroed):
            source.add(f"z{number} = {source.name(prepared.zeroed)}({source.name(room)})")
            source.add(_set(source, prepared, room.name, f"z{number}.data_ptr()"))


def _set(source: Source, prepared: Ready, buffer: str, address: str) -> str:
    """A line that sets the address of a buffer wherever it stands."""
    pointers = prepared.pointers(buffer)
    only = pointers.single
    if not pointers.launches:
        return "pass"
    if only is not None:
        return f"{source.name(only)}.value = {address}"
    return f"{source.name(pointers.point)}({address})"


def _one_behind_another(rooms: Sequence[Workspace]) -> tuple[dict[str, int], int]:
    """Where each workspace begins in memory that they share, and how many bytes that has."""
    places, end = {}, 0
    for room in rooms:
        places[room.name] = end
        end += -(-room.bytes // _ROOM_ALIGNMENT) * _ROOM_ALIGNMENT
    return places, end


def _needed(lay: Lay | None, tensor: torch.Tensor | None) -> Lay | None:
    """None where a tensor of this kind lies as it should."""
    return None if lay is None or lay(tensor) is tensor else lay


def _aligned(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else aligned(tensor)
