"""Where addresses stand in the arguments of a plan's launches: what a call points at its own tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from escalade.device.arguments import Pointers
from escalade.device.run import Executable
from escalade.engine.plan.kernels import Kernels


@dataclass(frozen=True)
class Addresses:
    """Where addresses stand in the arguments of a plan's launches."""

    outside: Mapping[str, Pointers]
    """Pointers to inputs and outputs that lie in the caller's tensors, by name."""
    arena: Pointers
    counters: Mapping[str, Pointers]

    @staticmethod
    def of(kernels: Kernels) -> Addresses:
        plan = kernels.plan
        found = Addresses(
            {name: Pointers() for name in plan.outside.values()},
            Pointers(),
            {name: Pointers() for name, workspace in plan.lasting.items() if workspace.zeroed},
        )
        steps = (step for step in plan.steps if step.runs)
        for step, executable in zip(steps, kernels.calls, strict=True):
            if not isinstance(executable, Executable):
                continue
            for role, name in {
                **step.node.inputs,
                "y": step.node.name,
                **plan.beside(step.node.name),
            }.items():
                if name in plan.outside:
                    end = plan.outside[name]
                    executable.add_to(found.outside[end], role, plan.places[name] - plan.places[end])
                elif name not in plan.graph.constants:
                    executable.add_to(found.arena, role, plan.places[name])
            for workspace in executable.recipe.workspaces:
                name = step.workspace_name(workspace)
                if name in found.counters:
                    executable.add_to(found.counters[name], workspace.name)
                elif name not in plan.lasting:
                    executable.add_to(found.arena, workspace.name, plan.places[name])
        return found
