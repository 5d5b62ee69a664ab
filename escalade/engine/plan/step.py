"""A step of a plan: a node, and what computes it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from escalade.device.recipe import Recipe, Workspace
from escalade.engine.graph.graph import Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.lowering import STORED, Lowered, SideBuffer
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
