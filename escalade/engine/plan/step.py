"""A step of a plan: a node, and who does it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from escalade.device.recipe import Recipe, Workspace
from escalade.engine.graph.graph import Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.lowering import STORED, Beside, Lowered
from escalade.ops.choose.choice import Choice

MOST_DIRECT_LAUNCHES = 3
"""Launches up to which launching kernels one by one costs the host no more than a CUDA graph with copies before and
after it."""


@dataclass(frozen=True)
class ConstantForm:
    """A constant as one kind of kernel wants it."""

    name: str
    form: str


@dataclass(frozen=True)
class Step:
    """A node, and who does it: a rung of a ladder, PyTorch, or nobody where the result is there already."""

    node: Node
    lowered: Lowered | None = None
    choice: Choice | None = None
    recipe: Recipe | None = None
    is_alias: bool = False
    """Whether the result is its input's bytes, seen differently."""
    beside: Beside | None = None
    """Whose kernels write the result beside their own."""
    why_pytorch: str = ""
    """Why PyTorch does it although a rung could."""

    @property
    def runs(self) -> bool:
        """Whether there is anything to be done for it."""
        return not self.is_alias and self.beside is None

    @property
    def in_pytorch(self) -> bool:
        return self.lowered is None and self.runs

    @property
    def is_moved(self) -> bool:
        """Whether kernels do it wherever its values lie."""
        return self.lowered is not None and self.lowered.at_places is not None

    def constant(self, role: str) -> ConstantForm:
        """The constant of that role in the form in which the step takes it."""
        operator = operator_of(self.node)
        forms = self.lowered.constants if self.lowered else operator.constants_in_pytorch(self.node)
        return ConstantForm(self.node.inputs[role], forms.get(role, STORED))

    def has_weights_ready(self, constants: Collection[str]) -> bool:
        """Whether its weights, which are all that it reads besides values, were there before the plan began: then its
        kernels need not wait for the step in front to read them.
        """
        values = operator_of(self.node).values
        return all(name in constants for role, name in self.node.inputs.items() if role not in values)

    def workspace_name(self, workspace: Workspace) -> str:
        return f"{self.node.name}/{workspace.name}"


def are_few_launches(steps: Sequence[Step]) -> bool:
    """Few, and nothing that calls on several streams at once would have to share: counters are one for all."""
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
