"""The plan of a network for one batch size: which kernels run, and on which bytes of one arena.

All of it is fixed before anything runs. Steps read and write values in the arena. Weights are stored outside it, packed
once into the layout that the chosen kernels read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from escalade.device.program import Program
from escalade.device.recipe import Workspace
from escalade.engine.graph.forms import STORAGE, Form
from escalade.engine.graph.graph import Graph
from escalade.engine.nodes.lowering import FP32
from escalade.engine.plan.arena import Lifetime
from escalade.engine.plan.step import ConstantForm, PlanStep, few_enough_launches
from escalade.ops.base.dtypes import QUANTIZED
from escalade.ops.base.problem import Problem
from escalade.ops.choose.choice import Choice


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
