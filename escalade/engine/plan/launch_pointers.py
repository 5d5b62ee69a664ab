"""Pointer arguments of a plan's launches, grouped by the buffer they point into.

A call rebinds a few of them to the caller's tensors instead of binding every kernel again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from escalade.device.arguments import BufferPointers
from escalade.device.run import Executable
from escalade.engine.plan.kernels import PlanKernels


@dataclass(frozen=True)
class LaunchPointers:
    """Pointer arguments of a plan's launches."""

    outside: Mapping[str, BufferPointers]
    """Pointers into the caller's tensors, by the name of the input or output."""
    arena: BufferPointers
    counters: Mapping[str, BufferPointers]
    """Pointers to workspaces that must be zero before the first launch, by name."""

    @staticmethod
    def of(kernels: PlanKernels) -> LaunchPointers:
        plan = kernels.plan
        found = LaunchPointers(
            {name: BufferPointers() for name in plan.outside.values()},
            BufferPointers(),
            {name: BufferPointers() for name, workspace in plan.persistent.items() if workspace.zeroed},
        )
        steps = (step for step in plan.steps if step.runs)
        for step, executable in zip(steps, kernels.calls, strict=True):
            if not isinstance(executable, Executable):
                continue
            for role, name in {
                **step.node.inputs,
                "y": step.node.name,
                **plan.side_outputs(step.node.name),
            }.items():
                if name in plan.outside:
                    holder = plan.outside[name]
                    executable.add_to(found.outside[holder], role, plan.offsets[name] - plan.offsets[holder])
                elif name not in plan.graph.constants:
                    executable.add_to(found.arena, role, plan.offsets[name])
            for workspace in executable.recipe.workspaces:
                name = step.workspace_name(workspace)
                if name in found.counters:
                    executable.add_to(found.counters[name], workspace.name)
                elif name not in plan.persistent:
                    executable.add_to(found.arena, workspace.name, plan.offsets[name])
        return found
