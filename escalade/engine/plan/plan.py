"""The plan of a network for one batch size: which kernels run, and on which bytes of one arena.

All of it is fixed before anything runs. Steps read and write values in the arena. Weights are stored outside it, packed
once into the layout that the chosen kernels read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from escalade.device.program import Program
from escalade.device.recipe import Recipe, Workspace
from escalade.engine.graph.forms import STORAGE, Form
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.lowering import FP32, STORED, Lowered, SideBuffer
from escalade.ops.base.dtypes import QUANTIZED
from escalade.ops.base.problem import Problem
from escalade.ops.choose.choice import Choice

MOST_DIRECT_LAUNCHES = 3
"""Up to this many launches, launching one by one costs the host no more than a CUDA graph with its copies."""


@dataclass(frozen=True)
class ConstantForm:
    """A constant in the layout and dtype that some kernels read."""

    name: str
    form: str


@dataclass(frozen=True)
class PlanStep:
    """A node, and what computes it: a rung, PyTorch, or nothing where the result exists already."""

    node: Node
    lowered: Lowered | None = None
    choice: Choice | None = None
    recipe: Recipe | None = None
    is_alias: bool = False
    """True if the result is a view of its input's bytes."""
    side_output: SideBuffer | None = None
    """The node whose kernels write this result besides their own, and the buffer they write it to."""
    why_pytorch: str = ""
    """Why PyTorch computes the node although a rung supports it."""

    @property
    def runs(self) -> bool:
        """True if the step computes anything."""
        return not self.is_alias and self.side_output is None

    @property
    def in_pytorch(self) -> bool:
        return self.lowered is None and self.runs

    @property
    def is_copy(self) -> bool:
        """True if its kernels copy elements from and to any offset and pitch."""
        return self.lowered is not None and self.lowered.at_placements is not None

    def constant(self, role: str) -> ConstantForm:
        """Return the constant of a role in the form that the step reads."""
        operator = operator_of(self.node)
        forms = self.lowered.constants if self.lowered else operator.pytorch_constants(self.node)
        return ConstantForm(self.node.inputs[role], forms.get(role, STORED))

    def weights_are_constant(self, constants: Collection[str]) -> bool:
        """Return True if all weights are constants, so that its kernels may read them before the previous step ends."""
        values = operator_of(self.node).values
        return all(name in constants for role, name in self.node.inputs.items() if role not in values)

    def workspace_name(self, workspace: Workspace) -> str:
        return f"{self.node.name}/{workspace.name}"


def few_enough_launches(steps: Sequence[PlanStep]) -> bool:
    """Return True if a call is a few launches without counters or other state that concurrent calls would share."""
    launches = 0
    for step in steps:
        if step.in_pytorch:
            return False
        if step.recipe is None:
            continue
        each = step.recipe.after_packing.steps
        if step.recipe.shared_state or any(workspace.zeroed for workspace in step.recipe.workspaces):
            return False
        launches += len(each)
    return 1 <= launches <= MOST_DIRECT_LAUNCHES


@dataclass(frozen=True)
class Lifetime:
    """Bytes that are live from step `first` through step `last`."""

    name: str
    bytes: int
    first: int
    last: int

    def overlaps(self, other: Lifetime) -> bool:
        return self.first <= other.last and other.first <= self.last


@dataclass(frozen=True)
class Plan:
    """Steps and memory of a network for one batch size."""

    dtype: str
    graph: Graph
    """The graph with concrete sizes."""
    steps: tuple[PlanStep, ...]
    forms: Mapping[str, Form]
    offsets: Mapping[str, int]
    """Byte offset of every value, and of every workspace that is only used during its step. Values in `outside` have
    offsets after the arena's end, for runs on the plan's own memory."""
    arena_bytes: int
    lifetimes: tuple[Lifetime, ...]
    """Live range in steps of every value and workspace in the arena: inputs from -1, outputs to `len(steps)`."""
    persistent: Mapping[str, Workspace]
    """Workspaces whose contents are kept from call to call: packed weights and counters."""
    constants: tuple[ConstantForm, ...]
    outside: Mapping[str, str]
    """Values stored in the caller's tensors instead of the arena, with the input or output whose bytes each shares."""
    outside_bytes: int
    pytorch_owned: Mapping[str, int]
    """Last use of each value in memory from PyTorch's allocator: results of PyTorch steps and their views, except
    outputs."""
    chosen: Mapping[tuple[str, Problem], Choice]
    """Choice by operation and dense problem, including nodes that PyTorch computes in the end."""

    @property
    def batch(self) -> int:
        """The size of the first input's first dimension; 1 if it has none."""
        batch = self.graph.inputs[0].shape[0] if self.graph.inputs and self.graph.inputs[0].shape else 1
        assert isinstance(batch, int)
        return batch

    @cached_property
    def output_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that a call returns, which are the model's; the plan may compute results in others."""
        return tuple(getattr(torch, name) for name in self.graph.output_types)

    @property
    def is_direct(self) -> bool:
        """True if a call is a few launches on nothing but the caller's tensors and scratch memory."""
        read, written = len(self.inputs_outside), len(self.outputs_outside)
        all_outside = (read, written) == (len(self.graph.inputs), len(self.graph.outputs))
        return all_outside and few_enough_launches(self.steps)

    @property
    def inputs_outside(self) -> tuple[str, ...]:
        """Inputs that kernels read in the caller's tensors; the others are copied into the arena."""
        return tuple(entry.name for entry in self.graph.inputs if entry.name in self.outside)

    @property
    def outputs_outside(self) -> tuple[str, ...]:
        """Outputs that kernels write in the caller's tensors; the others are copied from the arena."""
        return tuple(name for name in self.graph.outputs if name in self.outside)

    def side_outputs(self, name: str) -> Mapping[str, str]:
        """Return the values that a node's kernels write besides its result, by buffer name."""
        return self._side_outputs.get(name, {})

    @cached_property
    def _side_outputs(self) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = {}
        for step in self.steps:
            if step.side_output is not None:
                found.setdefault(step.side_output.node, {})[step.side_output.buffer] = step.node.name
        return found

    @property
    def programs(self) -> tuple[Program, ...]:
        """The distinct programs that the kernels are compiled from."""
        recipes = (step.recipe for step in self.steps if step.recipe)
        return tuple(dict.fromkeys(program for recipe in recipes for program in recipe.programs))

    @property
    def fallbacks(self) -> tuple[PlanStep, ...]:
        return tuple(step for step in self.steps if step.in_pytorch)

    @property
    def constant_bytes(self) -> int:
        sizes = {FP32: 4, **dict.fromkeys(QUANTIZED, 1)}
        storage = STORAGE[self.dtype].itemsize
        return sum(
            self.graph.constants[entry.name].numel() * sizes.get(entry.form, storage)
            for entry in self.constants
        )

    @property
    def persistent_bytes(self) -> int:
        return sum(workspace.bytes for workspace in self.persistent.values())

    @property
    def bytes(self) -> int:
        """Memory that a call uses, inputs and results included, allocations of PyTorch steps excluded."""
        return self.arena_bytes + self.outside_bytes + self.constant_bytes + self.persistent_bytes
