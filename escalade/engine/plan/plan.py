"""The plan of a network for one batch size: which kernels run, over which bytes of one arena.

All of it is known before anything runs. Steps read and write values in the arena; weights lie outside it,
packed once into the form that the chosen kernels want.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from escalade.device.program import Program
from escalade.device.recipe import Workspace
from escalade.engine.graph.forms import STORAGE, Form
from escalade.engine.graph.graph import Graph
from escalade.engine.nodes.lowering import FP8, FP32
from escalade.engine.plan.arena import Lifetime
from escalade.engine.plan.step import ConstantForm, Step, are_few_launches
from escalade.ops.base.problem import Problem
from escalade.ops.choose.choice import Choice


@dataclass(frozen=True)
class Plan:
    """What a network does for one batch size."""

    dtype: str
    graph: Graph
    """The graph with every size a number."""
    steps: tuple[Step, ...]
    forms: Mapping[str, Form]
    places: Mapping[str, int]
    """The offset of every value and of every workspace that a step uses only while it runs. Values that are outside
    follow behind the arena, for runs over memory of the plan's own."""
    arena_bytes: int
    """Bytes of all that lies inside."""
    lifetimes: tuple[Lifetime, ...]
    """When each value and workspace inside is alive, in steps from 0 on: inputs from -1, outputs to behind the last."""
    lasting: Mapping[str, Workspace]
    """Workspaces that are written once, and counters: they keep what they hold from call to call."""
    constants: tuple[ConstantForm, ...]
    outside: Mapping[str, str]
    """Values that lie in the caller's tensors instead of the arena: the input or output whose bytes each has. Kernels
    read inputs where they are and write results where they are wanted."""
    outside_bytes: int
    apart: Mapping[str, int]
    """Values of PyTorch's steps, which lie where PyTorch puts them, and their views: the last step at which each
    matters. Outputs are not among them."""
    chosen: Mapping[tuple[str, Problem], Choice]
    """What was chosen by operation and problem, every value by itself; also for what PyTorch does after all."""

    @property
    def batch(self) -> int:
        """The size of the first input's first dimension, if it has one."""
        batch = self.graph.inputs[0].shape[0] if self.graph.inputs and self.graph.inputs[0].shape else 1
        assert isinstance(batch, int)
        return batch

    @property
    def is_direct(self) -> bool:
        """Whether a call is a few launches over nothing but the caller's tensors and scratch memory."""
        read, written = len(self.inputs_outside), len(self.outputs_outside)
        all_outside = (read, written) == (len(self.graph.inputs), len(self.graph.outputs))
        return all_outside and are_few_launches(self.steps)

    @property
    def inputs_outside(self) -> tuple[str, ...]:
        """The inputs that are read where the caller has them; the others are copied into the arena."""
        return tuple(given.name for given in self.graph.inputs if given.name in self.outside)

    @property
    def outputs_outside(self) -> tuple[str, ...]:
        """The outputs that are written where the caller gets them; the others are copied there."""
        return tuple(name for name in self.graph.outputs if name in self.outside)

    def beside(self, name: str) -> Mapping[str, str]:
        """The values that a node's kernels write beside its own, by the buffers that they are there."""
        return self._beside.get(name, {})

    @cached_property
    def _beside(self) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = {}
        for step in self.steps:
            if step.beside is not None:
                found.setdefault(step.beside.node, {})[step.beside.buffer] = step.node.name
        return found

    @property
    def programs(self) -> tuple[Program, ...]:
        """What its kernels are compiled of."""
        recipes = (step.recipe for step in self.steps if step.recipe)
        return tuple(dict.fromkeys(program for recipe in recipes for program in recipe.programs))

    @property
    def fallbacks(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.in_pytorch)

    @property
    def constant_bytes(self) -> int:
        sizes = {FP32: 4, FP8: 1}
        storage = STORAGE[self.dtype].itemsize
        return sum(
            self.graph.constants[entry.name].numel() * sizes.get(entry.form, storage)
            for entry in self.constants
        )

    @property
    def lasting_bytes(self) -> int:
        return sum(workspace.bytes for workspace in self.lasting.values())

    @property
    def bytes(self) -> int:
        """All the memory that a call uses, its inputs and results included, PyTorch's own steps apart."""
        return self.arena_bytes + self.outside_bytes + self.constant_bytes + self.lasting_bytes
