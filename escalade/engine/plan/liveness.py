"""When each value of a plan is alive and whose bytes it has, and the arenas that follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from escalade.device.recipe import Workspace
from escalade.engine.graph.forms import Form
from escalade.engine.graph.graph import Graph
from escalade.engine.nodes import operator_of
from escalade.engine.plan.arena import Arena, Lifetime, assign
from escalade.engine.plan.step import Step, are_few_launches
from escalade.engine.plan.subbuffers import Parts


@dataclass(frozen=True)
class Lives:
    """When each value is alive: inputs from the start, outputs to the end, everything else from its step to its last
    reader's.
    """

    first: Mapping[str, int]
    lives: Mapping[str, int]
    """The last step at which the bytes matter, of values that have bytes of their own."""
    owner: Mapping[str, str]
    """Values that share another's bytes."""
    apart: Mapping[str, int]
    """The last step at which values matter that have no place in the arena: PyTorch's, and views of them."""

    def root(self, name: str) -> str:
        return _root(name, self.owner)

    def offset(self, name: str, parts: Parts) -> int:
        """Bytes from the beginning of the root."""
        total = 0
        while name in self.owner:
            if name in parts.places:
                total += parts.places[name].first * parts.forms[name].dtype.itemsize
            name = self.owner[name]
        return total

    @staticmethod
    def of(graph: Graph, steps: Sequence[Step], parts: Parts, bound: frozenset[str]) -> Lives:
        """The values but those that are `bound` to tensors of somebody else's; views of these lie apart too."""
        end, forms = len(steps), parts.forms
        owner = {name: place.whole for name, place in parts.places.items()}
        last: dict[str, int] = {}
        made = {step.node.name: number for number, step in enumerate(steps)}
        made |= {step.node.name: made[step.beside.node] for step in steps if step.beside is not None}
        for step in steps:
            number = made[step.node.name]
            for name in step.node.inputs.values():
                last[name] = max(last.get(name, number), number)
            last.setdefault(step.node.name, number)
        for name in graph.outputs:
            last[name] = end
        for step in reversed(steps):  # a view's bytes are those of what it is a view of
            if step.is_alias or (step.in_pytorch and operator_of(step.node).may_share(step.node)):
                for name in step.node.inputs.values():
                    last[name] = max(last[name], last[step.node.name])
        in_pytorch = {step.node.name for step in steps if step.in_pytorch}
        given = {entry.name for entry in graph.inputs}
        first = dict.fromkeys(given, -1)
        lives: dict[str, int] = {name: last.get(name, -1) for name in given}
        for name, whole in owner.items():
            first[name] = made[name]
            first[whole] = min(first.get(whole, end), made[name], made.get(whole, end))
            lives[whole] = max(lives.get(whole, -1), last[name], last[whole])
        for number, step in enumerate(steps):
            name = step.node.name
            is_another = step.is_alias and name not in parts.in_place
            if name in first and not is_another:
                continue
            first[name] = made[name]
            shared = None
            if step.is_alias:
                shared = step.node.inputs["x"]
            elif step.lowered and step.lowered.in_place:
                candidate = step.node.inputs[step.lowered.in_place]
                whole = _root(candidate, owner)
                if (
                    whole in lives
                    and whole not in given
                    and whole not in in_pytorch
                    and lives[whole] == number
                    and forms[candidate].bytes == forms[name].bytes
                    and not forms[candidate].pitch
                    and list(step.node.inputs.values()).count(candidate) == 1
                ):
                    shared = candidate
            if shared is not None and _root(shared, owner) in first:
                owner[name] = shared
                whole = _root(name, owner)
                # What others are parts of may itself be another's bytes.
                lives[whole] = max(lives[whole], last[name], lives.pop(name, -1))
            else:
                lives[name] = last[name]
        in_arena = {_root(name, owner) for name in graph.outputs}
        elsewhere = (in_pytorch - in_arena) | bound
        apart = {name: lives[_root(name, owner)] for name in first if _root(name, owner) in elsewhere}
        lives = {name: end for name, end in lives.items() if name not in apart}
        apart = {name: end for name, end in apart.items() if name not in bound}
        return Lives(first, lives, owner, apart)


def _root(name: str, owner: Mapping[str, str]) -> str:
    while name in owner:
        name = owner[name]
    return name


def lying_outside(
    graph: Graph, steps: Sequence[Step], values: Lives, forms: Mapping[str, Form]
) -> dict[str, str]:
    """The values with the bytes of an input or an output that kernels alone read and write.

    The others are copied: those of PyTorch's steps and of kernels that read what these give, results that are no
    tensors of their own, but an input (which is copied then), a constant, or the bytes of another result, and results
    of another type than the model's. Calls of few launches have no arena to leave these in.
    """
    copied = {
        values.root(name)
        for step in steps
        if step.in_pytorch or not values.apart.keys().isdisjoint(step.node.inputs.values())
        for name in (*step.node.inputs.values(), step.node.name)
    }
    given = {entry.name for entry in graph.inputs}
    results = Counter(map(values.root, graph.outputs))
    holders = {name: name for name in given - copied - results.keys()}
    few = are_few_launches(steps)
    for name, dtype in zip(graph.outputs, graph.output_types, strict=True):
        whole = values.root(name)
        if whole not in values.lives.keys() - given - copied or results[whole] > 1:
            continue
        as_returned = few or forms[name].dtype is getattr(torch, dtype)
        if as_returned and forms[whole].bytes == forms[name].bytes:
            holders[whole] = name
    everything = (*values.lives, *values.owner)
    return {name: holders[values.root(name)] for name in everything if values.root(name) in holders}


def arenas(
    steps: Sequence[Step],
    values: Lives,
    forms: Mapping[str, Form],
    lasting: Mapping[str, Workspace],
    outside: Mapping[str, str],
) -> tuple[Arena, Arena]:
    """A place for everything that is inside, and for all that is outside."""
    own = [
        Lifetime(name, forms[name].bytes, values.first[name], end)
        for name, end in values.lives.items()
        if name not in outside
    ]
    scratch = [
        Lifetime(step.workspace_name(workspace), workspace.bytes, number, number)
        for number, step in enumerate(steps)
        if step.recipe
        for workspace in step.recipe.workspaces
        if step.workspace_name(workspace) not in lasting
    ]
    # Apart from each other and from all else, as the caller's tensors are.
    outer = [Lifetime(name, forms[name].bytes, 0, 0) for name in values.lives if name in outside]
    return assign([*own, *scratch]), assign(outer)
