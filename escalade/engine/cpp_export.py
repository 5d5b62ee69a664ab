"""Export of plans for C++ programs: one file with machine code, weights, and every launch, beside a small runtime.

A launch is saved as data: grid, block, shared memory, cluster, and arguments. Pointers are saved as a region and an
offset, and tensor maps as their parameters, because both depend on addresses that only the running program has.
`cpp/escalade_runtime.cpp` reads the file; the two change together, with `VERSION`.
"""

from __future__ import annotations

import os
import pathlib
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

import torch

from escalade import files
from escalade.device.nvrtc import compile_program
from escalade.device.precompilation import precompile
from escalade.device.program import Program
from escalade.device.recipe import (
    Addresses,
    Argument,
    Buffer,
    Im2colMap,
    Int64,
    Ints,
    KernelCall,
    ReleaseDependents,
    TensorMap,
    TiledMap,
    WeightsReady,
)
from escalade.device.tensor_map import DATA_TYPES, strides_of
from escalade.engine.graph.forms import Form
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.lowering import OWN
from escalade.engine.plan.constants import ConstantCache
from escalade.engine.plan.plan import ConstantForm, Plan, PlanStep
from escalade.errors import CompileError, UnsupportedError
from escalade.ops.base.card import Card

MAGIC = b"ESCALADE-PLANS\0\0"
VERSION = 1
PLAN_FILE = "network.plans"
SOURCES = pathlib.Path(__file__).with_name("cpp")
"""The runtime, an example and its CMake project, which are written beside the plans."""
_ALIGNMENT = 256
_MOST_NAMED = 8


class Region(IntEnum):
    """Memory that a pointer points into; `Location.index` is the input or output."""

    null = 0
    arena = 1
    persistent = 2
    constants = 3
    input = 4
    output = 5


class Kind(IntEnum):
    """Kinds of kernel arguments."""

    value = 0
    pointer = 1
    pointers = 2
    tiled_map = 3
    im2col_map = 4


@dataclass(frozen=True)
class Location:
    region: Region
    offset: int = 0
    index: int = 0

    def moved(self, offset: int) -> Location:
        return Location(self.region, self.offset + offset, self.index)


NULL = Location(Region.null)


def export(
    folder: str | os.PathLike[str],
    card: Card,
    dtype: str,
    plans: Iterable[Plan],
) -> pathlib.Path:
    """Write plans for one card, and the runtime that runs them, into a folder; returns the path of the plans."""
    assert card.architecture is not None, "plans for the twin are not exported"
    target = files.as_path(folder)
    files.require_writable_folder(target)
    constants = _Constants(dtype)
    programs: dict[Program, int] = {}
    written = [_PlanWriter(plan, constants, programs).data() for plan in plans]
    failures = precompile(list(programs), card.architecture)
    if failures:
        raise CompileError(failures[0].message)
    body = _Data()
    body.text(card.architecture)
    body.text(card.name)
    body.u32(card.multiprocessors)
    body.text(dtype)
    body.u32(len(programs))
    for program in programs:
        body.text(program.entry)
        body.blob(compile_program(program, card.architecture).code)
    body.blob(constants.data)
    body.u32(len(written))
    for each in written:
        body.extend(each)
    header = MAGIC + struct.pack("<IIQ", VERSION, zlib.crc32(body), len(body))
    target.mkdir(parents=True, exist_ok=True)
    for source in sorted(SOURCES.iterdir()):
        files.replace(target / source.name, source.read_bytes())
    files.replace(target / PLAN_FILE, header + bytes(body))
    return target / PLAN_FILE


class _Data(bytearray):
    """Little-endian fields."""

    def u8(self, value: int) -> None:
        self += struct.pack("<B", value)

    def u32(self, *values: int) -> None:
        self += struct.pack(f"<{len(values)}I", *values)

    def u64(self, *values: int) -> None:
        self += struct.pack(f"<{len(values)}Q", *values)

    def i32(self, *values: int) -> None:
        self += struct.pack(f"<{len(values)}i", *values)

    def i64(self, *values: int) -> None:
        self += struct.pack(f"<{len(values)}q", *values)

    def text(self, value: str) -> None:
        encoded = value.encode()
        self.u32(len(encoded))
        self += encoded

    def blob(self, value: bytes | bytearray) -> None:
        self.u64(len(value))
        self += value

    def location(self, value: Location) -> None:
        self.u8(value.region)
        self.u32(value.index)
        self.i64(value.offset)


class _Constants:
    """The weights of all plans as one block of memory."""

    def __init__(self, dtype: str) -> None:
        self.data = bytearray()
        self._cache = ConstantCache(dtype, torch.device("cpu"))
        self._offsets: dict[int, int] = {}
        self._kept: list[torch.Tensor] = []

    def add(self, plan: Plan, entry: ConstantForm) -> tuple[torch.Tensor, Location]:
        tensor = self._cache.get(entry, plan.graph)
        if id(tensor) not in self._offsets:
            self.data += bytes(-len(self.data) % _ALIGNMENT)
            self._offsets[id(tensor)] = len(self.data)
            self._kept.append(tensor)  # so that no other tensor gets its id
            self.data += torch.as_strided(tensor, (tensor.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
        return tensor, Location(Region.constants, self._offsets[id(tensor)])


class _PlanWriter:
    """One plan as data."""

    def __init__(self, plan: Plan, constants: _Constants, programs: dict[Program, int]) -> None:
        _require_kernels(plan)
        self._plan = plan
        self._constants = constants
        self._programs = programs
        self._persistent: dict[str, int] = {}
        self._persistent_bytes = 0
        self._input_indices = {entry.name: index for index, entry in enumerate(plan.graph.inputs)}
        self._output_indices = {name: index for index, name in reversed([*enumerate(plan.graph.outputs)])}

    def data(self) -> _Data:
        plan, data = self._plan, _Data()
        zeroed = [
            (self._allocate(name, each.bytes), each.bytes)
            for name, each in plan.persistent.items()
            if each.zeroed
        ]
        packing, calls = self._launches()
        copies_in, copies_out, outputs = self._ends()
        data.u64(plan.arena_bytes, self._persistent_bytes)
        data.u32(len(plan.graph.inputs))
        for entry in plan.graph.inputs:
            _write_tensor(data, entry.name, plan.forms[entry.name])
        data.u32(len(outputs))
        for name, form in outputs:
            _write_tensor(data, name, form)
        for copies in (copies_in, copies_out):
            data.u32(len(copies))
            for source, target, size in copies:
                data.location(source)
                data.location(target)
                data.u64(size)
        data.u32(len(zeroed))
        for offset, size in zeroed:
            data.u64(offset, size)
        for launches in (packing, calls):
            data.u32(len(launches))
            for launch in launches:
                data.extend(launch)
        return data

    def _allocate(self, name: str, size: int) -> int:
        if name not in self._persistent:
            self._persistent[name] = self._persistent_bytes
            self._persistent_bytes += size + -size % _ALIGNMENT
        return self._persistent[name]

    def _location(self, name: str) -> Location:
        """Return where a value is stored."""
        plan = self._plan
        if name in plan.graph.constants:
            return self._constants.add(plan, ConstantForm(name, OWN))[1]
        if name not in plan.outside:
            return Location(Region.arena, plan.offsets[name])
        holder = plan.outside[name]
        offset = plan.offsets[name] - plan.offsets[holder]
        if holder in self._input_indices:
            return Location(Region.input, offset, self._input_indices[holder])
        return Location(Region.output, offset, self._output_indices[holder])

    def _ends(
        self,
    ) -> tuple[
        list[tuple[Location, Location, int]], list[tuple[Location, Location, int]], list[tuple[str, Form]]
    ]:
        """Return the copies of inputs into the arena, the copies of results out of it, and the form of each result."""
        plan = self._plan
        copies_in, copies_out, outputs = [], [], []
        for index, entry in enumerate(plan.graph.inputs):
            form = _require_whole(entry.name, plan.forms[entry.name])
            if entry.name not in plan.outside:
                copies_in.append((Location(Region.input, 0, index), self._location(entry.name), form.bytes))
        for index, name in enumerate(plan.graph.outputs):
            target, source = Location(Region.output, 0, index), self._location(name)
            if name in plan.graph.constants:
                tensor, _ = self._constants.add(plan, ConstantForm(name, OWN))
                form = Form(tuple(tensor.shape), tensor.dtype, "flat")
            else:
                form = plan.forms[name]
            outputs.append((name, _require_whole(name, form)))
            if source != target:
                copies_out.append((source, target, form.bytes))
        return copies_in, copies_out, outputs

    def _launches(self) -> tuple[list[_Data], list[_Data]]:
        """Return the launches that pack weights, run once, and those of a call."""
        packing: list[_Data] = []
        calls: list[_Data] = []
        steps = [step for step in self._plan.steps if step.runs]
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            assert step.recipe is not None
            recipe, buffers = step.recipe, self._buffers(step)
            constant = step.weights_are_constant(self._plan.graph.constants)
            early = False
            if following is not None and following.recipe is not None:
                later = following.recipe
                early = later.launches_early_after_packing if constant else later.launches_early
            packed = recipe.packing.steps if constant else ()
            repeated = (recipe.after_packing if constant else recipe).steps
            label = (
                f"{step.node.source or step.node.name} ({step.lowered.problem.name if step.lowered else ''})"
            )
            for found, chosen, flags in (
                (packing, packed, (False, False)),
                (calls, repeated, (constant, early)),
            ):
                for call in chosen:
                    if not isinstance(call, KernelCall):
                        raise UnsupportedError(
                            f"{label}: {call.program} fills constant memory, which C++ programs cannot; compile "
                            "without naming this rung"
                        )
                    # The first launch must not overlap the caller's work. Lanes run one after another, so a launch must
                    # not overlap one of another lane.
                    overlaps = call.overlap and bool(found) and not recipe.side_lanes
                    found.append(self._launch(call, buffers, flags, overlaps, label))
        return packing, calls

    def _buffers(self, step: PlanStep) -> dict[str, Location]:
        """Return where the tensors and workspaces of a step's kernels are, as `PlanMemory.of` binds them."""
        plan, name = self._plan, step.node.name
        assert step.recipe is not None and step.lowered is not None
        found = {
            role: self._constants.add(plan, step.constant(role))[1]
            if each in plan.graph.constants
            else self._location(each)
            for role, each in step.node.inputs.items()
        }
        found["y"] = self._location(name)
        read = plan.side_outputs(name)
        meta = torch.device("meta")
        for buffer, tensor in step.lowered.operation.extra_outputs(step.lowered.problem, meta).items():
            if buffer not in read:
                offset = self._allocate(f"{name}/unread/{buffer}", tensor.nbytes)
                found[buffer] = Location(Region.persistent, offset)
        found |= {buffer: self._location(each) for buffer, each in read.items()}
        for workspace in step.recipe.workspaces:
            full = step.workspace_name(workspace)
            if full in plan.persistent:
                offset = self._allocate(full, plan.persistent[full].bytes)
                found[workspace.name] = Location(Region.persistent, offset)
            else:
                found[workspace.name] = Location(Region.arena, plan.offsets[full])
        return found

    def _launch(
        self,
        call: KernelCall,
        buffers: Mapping[str, Location],
        flags: tuple[bool, bool],
        overlaps: bool,
        label: str,
    ) -> _Data:
        data = _Data()
        data.u32(self._programs.setdefault(call.program, len(self._programs)))
        data.text(label)
        data.u32(*call.grid, *call.block, *call.cluster, call.shared_bytes)
        data.u8(overlaps)
        data.u32(len(call.arguments))
        for argument in call.arguments:
            _write_argument(data, argument, buffers, flags)
        return data


def _require_kernels(plan: Plan) -> None:
    """Reject plans with PyTorch steps, which need Python."""
    steps = [step for step in plan.steps if step.in_pytorch]
    if not steps:
        return
    named = [
        f"{step.node.source or step.node.name} ({operator_of(step.node).title(step.node)})"
        for step in steps[:_MOST_NAMED]
    ]
    more = f" and {len(steps) - _MOST_NAMED} more" if len(steps) > _MOST_NAMED else ""
    raise UnsupportedError(
        f"the plan computes {', '.join(named)}{more} with PyTorch, which a C++ program does not have; `explain` says "
        "why. Replace these layers, or leave them to the program"
    )


def _require_whole(name: str, form: Form) -> Form:
    if form.pitch:
        raise UnsupportedError(f"{name} is part of a larger value in the plan; C++ programs cannot copy it")
    return form


def _write_tensor(data: _Data, name: str, form: Form) -> None:
    data.text(name)
    data.text(str(form.dtype).removeprefix("torch."))
    data.u32(len(form.shape))
    data.i64(*form.shape, *form.meta_tensor().stride())
    data.u64(form.bytes)


def _write_argument(
    data: _Data, argument: Argument, buffers: Mapping[str, Location], flags: tuple[bool, bool]
) -> None:
    weights_ready, release_dependents = flags
    match argument:
        case Buffer():
            data.u8(Kind.pointer)
            data.location(_pointed(argument, buffers))
        case Addresses(pointers):
            data.u8(Kind.pointers)
            data.u32(len(pointers))
            for buffer in pointers:
                data.location(_pointed(buffer, buffers))
        case TiledMap() | Im2colMap():
            _write_map(data, argument, _pointed(argument.buffer, buffers))
        case Int64(value):
            _write_value(data, struct.pack("<q", value))
        case Ints(values):
            _write_value(data, b"".join(map(_int32, values)))
        case WeightsReady():
            _write_value(data, struct.pack("<i", weights_ready))
        case ReleaseDependents():
            _write_value(data, struct.pack("<i", release_dependents))
        case float():
            _write_value(data, struct.pack("<f", argument))
        case _:
            _write_value(data, _int32(argument))


def _int32(value: int) -> bytes:
    """Return four bytes; multipliers of divisions are unsigned, so they may use all 32 bits."""
    return struct.pack("<I", value & 0xFFFFFFFF)


def _write_value(data: _Data, value: bytes) -> None:
    data.u8(Kind.value)
    data.u32(len(value))
    data.extend(value)


def _write_map(data: _Data, tensor_map: TensorMap, location: Location) -> None:
    data.u8(Kind.tiled_map if isinstance(tensor_map, TiledMap) else Kind.im2col_map)
    data.location(location)
    data.text(DATA_TYPES[tensor_map.element])
    data.u32(tensor_map.swizzle, len(tensor_map.sizes))
    data.u64(*tensor_map.sizes, *strides_of(tensor_map))
    if isinstance(tensor_map, TiledMap):
        data.u32(*tensor_map.box)
    else:
        data.i32(*tensor_map.lower, *tensor_map.upper)
        data.u32(tensor_map.channels, tensor_map.pixels, 1, *tensor_map.stride, 1)


def _pointed(buffer: Buffer, buffers: Mapping[str, Location]) -> Location:
    found = buffers.get(buffer.name)
    if found is None:
        assert buffer.optional, f"{buffer.name} is not among {sorted(buffers)}"
        return NULL
    return found.moved(buffer.offset)
