"""One prepared call: everything that depends on shapes, strides, dtypes and settings is computed ahead.

What remains per call: allocate outputs, set pointers, launch. It is Python generated per kind of call, straight-line
code without lookups or loops: a call costs the host more time than a small kernel costs the GPU, mostly in loops over
lists that never change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from escalade.device.recipe import Workspace
from escalade.device.strides import ALIGNMENT, aligned_alike, packed
from escalade.device.torch_private import FAST_PATHS
from escalade.ops.base.operation import Operation
from escalade.ops.base.problem import Problem
from escalade.ops.calling.executables import PreparedRung, prepare_rung

_WORKSPACE_ALIGNMENT = 256  # bytes, as cudaMalloc
Function = Callable[..., Any]
Packer = Callable[[Any], Any]
"""Returns an argument in the layout a kernel expects: itself if it already is. May create a missing tensor."""


class FunctionSource:
    """The lines of a generated function, and the objects they refer to."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._objects: dict[str, Any] = {}

    def add(self, *lines: str) -> None:
        self.lines += lines

    def name(self, value: Any) -> str:
        """Return the variable of an object in the generated code."""
        for name, known in self._objects.items():
            if known is value:
                return name
        name = f"object{len(self._objects)}"
        self._objects[name] = value
        return name

    def function(self, name: str, parameters: Sequence[str]) -> Function:
        """Compile the lines as the body of a function."""
        body = [f"        {line}" for line in self.lines]
        # Objects are closure variables, which load faster than globals.
        lines = [
            f"def make({', '.join(self._objects)}):",
            f"    def {name}({', '.join(parameters)}):",
            *body,
            f"    return {name}",
        ]
        space: dict[str, Any] = {}
        exec("\n".join(lines), space)
        function: Function = space["make"](**self._objects)
        return function


def packer(layout: str) -> Packer:
    """Return a packer of 4-D tensors into that layout, and of all others into row-major order."""

    def pack(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else packed(tensor, layout if tensor.dim() == 4 else "flat")

    return pack


@dataclass(frozen=True)
class CallPlan:
    """Results of an operator for one kind of arguments, and the problem that computes them."""

    operation: Operation[Any]
    make_results: Callable[[], torch.Tensor | Mapping[str, torch.Tensor]]
    """Returns the empty results by buffer, in the order of the operator's; a single tensor is `y`. Called while PyTorch
    traces, too: sizes may be symbolic then."""
    make_problem: Callable[[], Problem | None]
    """Returns the problem, or None if there is nothing to compute. Called before `make_results`, so that its sentences
    are what a caller reads."""
    packers: Mapping[str, Packer] = field(default_factory=dict)
    """Conversions of inputs by buffer; the others are packed in the problem's layout."""
    finish: Callable[[Any], Any] | None = None
    """Applied to the result, or to the tuple of results."""
    fill: Callable[[Any], Any] | None = None
    """Applied before `finish` if there is nothing to compute, as for an empty batch."""
    names: tuple[str, ...] = ()
    """Buffers of the tensors of a list argument."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Buffers of arguments whose names differ."""

    def results(self) -> Mapping[str, torch.Tensor]:
        made = self.make_results()
        return {"y": made} if isinstance(made, torch.Tensor) else made

    def fake(self) -> Any:
        """Return what a call returns, without contents."""
        result = _single(tuple(self.results().values()))
        return result if self.finish is None else self.finish(result)


def _single(results: tuple[Any, ...]) -> Any:
    return results[0] if len(results) == 1 else results


class PreparedCall:
    """A plan that its thread executes repeatedly.

    `run` takes the operator's arguments, with list arguments flattened.
    """

    def __init__(
        self,
        plan: CallPlan,
        device: torch.device,
        buffers: Mapping[int, str],
        arguments: Sequence[Any],
        rung: str | None,
    ) -> None:
        """`buffers` maps positions of tensor arguments to buffers; `arguments` are those of the first call."""
        problem = plan.make_problem()
        samples, pack, first_step = plan.results(), packer(problem.layout if problem else "flat"), plan.fill
        if rung is not None:
            plan.operation.ladder.rung(rung)  # raises for an unknown one, even if there is nothing to compute
        self._prepared = None
        if problem is not None and problem.batch and next(iter(samples.values())).numel():
            first_step = None
            self._prepared = prepare_rung(plan.operation, problem, device, rung)
            form = self._prepared.problem.layout
            if form != problem.layout:  # computed in the rung's layout, then converted
                first_step, pack = partial(_converted, pack), packer(form)
                samples = {name: pack(sample.to("meta")) for name, sample in samples.items()}
        self._device = device
        self.index = device.index if device.type == "cuda" else None
        """The GPU that must be current; None for the CPU."""
        steps = [step for step in (first_step, plan.finish) if step is not None]
        self._finish: Function | None = (
            partial(_applied, steps) if len(steps) > 1 else next(iter(steps), None)
        )
        self._inputs = [
            (position, name, _needed(plan.packers.get(name, pack), arguments[position]))
            for position, name in buffers.items()
        ]
        self._samples = {
            name: (tuple(sample.shape), sample.stride(), sample.dtype) for name, sample in samples.items()
        }
        self._by_pointers = False
        self.arguments = len(arguments)
        self.run: Function = self._run_by_name

    def _run_by_name(self, arguments: Sequence[Any]) -> Any:
        """Bind all buffers by name, so that a missing one raises. The twin always runs this way."""
        made = {
            name: torch.empty_strided(size, stride, dtype=dtype, device=self._device)
            for name, (size, stride, dtype) in self._samples.items()
        }
        prepared = self._prepared
        if prepared is not None:
            given = {
                name: _aligned(arguments[position] if pack is None else pack(arguments[position]))
                for position, name, pack in self._inputs
            }
            prepared.run({**given, **made})
            if prepared.executable.supports_pointer_updates:
                self._inputs = [one for one in self._inputs if given[one[1]] is not None]
                self._by_pointers = True
                source = FunctionSource()
                source.add(self.unpack_line("arguments"))
                source.add(f"return {self.write(source)}")
                self.run = source.function("run", ["arguments"])
        result = _single(tuple(made.values()))
        return result if self._finish is None else self._finish(result)

    @property
    def names(self) -> list[str]:
        """Variables of the arguments in the code of `write`."""
        return [f"a{position}" for position in range(self.arguments)]

    def unpack_line(self, sequence: str) -> str:
        """Return the line that assigns the items of `sequence` to `names`."""
        return f"{', '.join(self.names)}, = {sequence}"

    def write(self, source: FunctionSource) -> str:
        """Append the code of one call, with arguments in `names`, and return the expression of its result.

        On a GPU, after a first run has bound every buffer, the code writes pointers into the launch parameters.
        """
        prepared = self._prepared
        if prepared is None or not self._by_pointers:
            return f"{source.name(self.run)}(({', '.join(self.names)},))"
        add, name = source.add, source.name
        allocate = name(FAST_PATHS.allocator(self._device))
        for i, _, pack in self._inputs:
            add(f"t{i} = a{i}" if pack is None else f"t{i} = {name(pack)}(a{i})")
        positions = [position for position, _, _ in self._inputs]
        pointers = [f"p{i} = t{i}.data_ptr()" for i in positions]
        add(*pointers, f"if ({' | '.join(f'p{i}' for i in positions)}) % {ALIGNMENT}:")
        add(*[f"    t{i} = {name(_aligned)}(t{i})" for i in positions])
        add(*[f"    {line}" for line in pointers])
        for i, buffer, _ in self._inputs:
            add(_set_line(source, prepared, buffer, f"p{i}"))
        for number, (buffer, sample) in enumerate(self._samples.items()):
            add(f"y{number} = {allocate}({', '.join(map(name, sample))})")
            add(_set_line(source, prepared, buffer, f"y{number}.data_ptr()"))
        workspaces = [one for one in prepared.executable.recipe.workspaces if one.name not in self._samples]
        self._write_workspaces(source, prepared, allocate, workspaces)
        add(f"{name(prepared.executable.launcher())}()")
        results = [f"y{number}" for number in range(len(self._samples))]
        result = results[0] if len(results) == 1 else f"({', '.join(results)})"
        return result if self._finish is None else f"{name(self._finish)}({result})"

    def _write_workspaces(
        self, source: FunctionSource, prepared: PreparedRung, allocate: str, workspaces: Sequence[Workspace]
    ) -> None:
        """Append the allocations. Local variables of the generated function keep them alive until the launch."""
        offsets, size = _offsets([one for one in workspaces if not one.zeroed])
        if size:
            source.add(f"scratch = {allocate}(({size},), (1,), {source.name(torch.uint8)})")
            source.add("base = scratch.data_ptr()")
        for buffer, offset in offsets.items():
            source.add(_set_line(source, prepared, buffer, f"base + {offset}"))
        for number, workspace in enumerate(one for one in workspaces if one.zeroed):
            source.add(f"z{number} = {source.name(prepared.zeroed)}({source.name(workspace)})")
            source.add(_set_line(source, prepared, workspace.name, f"z{number}.data_ptr()"))


def _set_line(source: FunctionSource, prepared: PreparedRung, buffer: str, address: str) -> str:
    """Return a line that writes the address of a buffer into all launch parameters that hold it."""
    pointers = prepared.pointers(buffer)
    only = pointers.single
    if not pointers.launches:
        return "pass"
    if only is not None:
        return f"{source.name(only)}.value = {address}"
    return f"{source.name(pointers.point)}({address})"


def _offsets(workspaces: Sequence[Workspace]) -> tuple[dict[str, int], int]:
    """Return the offsets of workspaces in one allocation, and its size in bytes."""
    offsets, end = {}, 0
    for workspace in workspaces:
        offsets[workspace.name] = end
        end += -(-workspace.bytes // _WORKSPACE_ALIGNMENT) * _WORKSPACE_ALIGNMENT
    return offsets, end


def _converted(convert: Packer, result: Any) -> Any:
    return convert(result) if isinstance(result, torch.Tensor) else tuple(map(convert, result))


def _applied(steps: Sequence[Function], result: Any) -> Any:
    for step in steps:
        result = step(result)
    return result


def _needed(pack: Packer | None, tensor: torch.Tensor | None) -> Packer | None:
    """Return None if a tensor of this kind needs no conversion."""
    return None if pack is None or pack(tensor) is tensor else pack


def _aligned(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else aligned_alike(tensor)
