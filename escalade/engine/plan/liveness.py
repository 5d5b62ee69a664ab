"""Liveness and buffer sharing of a plan's values, and the arenas that hold them."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from escalade.device.recipe import Workspace
from escalade.engine.graph.forms import Form
from escalade.engine.graph.graph import Graph
from escalade.engine.nodes import operator_of
from escalade.engine.plan.plan import Lifetime, PlanStep, few_enough_launches
from escalade.engine.plan.subbuffers import SubbufferLayout

ALIGNMENT = 256
"""Bytes that every offset is a multiple of, for vector loads and TMA."""


@dataclass(frozen=True)
class Arena:
    """Offsets by name, the total size in bytes, and the lifetimes they were assigned from."""

    offsets: Mapping[str, int]
    bytes: int
    lifetimes: tuple[Lifetime, ...]


def assign_offsets(lifetimes: Iterable[Lifetime]) -> Arena:
    """Place the largest first, each at the lowest offset that is free for its whole lifetime."""
    placed: list[tuple[int, int, int, int]] = []
    """Start and end of each value in bytes, and its first and last step, by start."""
    values = sorted(lifetimes, key=lambda value: (-value.bytes, value.first, value.name))
    offsets: dict[str, int] = {}
    total = 0
    for value in values:
        size = -(-max(value.bytes, 1) // ALIGNMENT) * ALIGNMENT
        start, begin, end = 0, value.first, value.last
        for low, high, first, last in placed:
            if begin <= last and first <= end:
                if start + size <= low:
                    break
                start = max(start, high)
        insort(placed, (start, start + size, begin, end))
        offsets[value.name] = start
        total = max(total, start + size)
    return Arena(offsets, total, tuple(values))


def peak_bytes(lifetimes: Sequence[Lifetime], first: int, last: int) -> int:
    """Return the most bytes that are live at any one step from `first` through `last`."""
    return max(
        (
            sum(value.bytes for value in lifetimes if value.first <= step <= value.last)
            for step in range(first, last + 1)
        ),
        default=0,
    )


@dataclass(frozen=True)
class Liveness:
    """Live range and storage of every value.

    Inputs are live from the start (step -1), outputs to the end, other values from their step to their last reader.
    """

    first: Mapping[str, int]
    live_until: Mapping[str, int]
    """Last step that needs the bytes of each value with a buffer of its own, its views and subbuffers included."""
    owner: Mapping[str, str]
    """The value whose bytes each view, subbuffer or in-place result shares."""
    pytorch_owned: Mapping[str, int]
    """Last use of each value in memory from PyTorch's allocator: results of PyTorch steps, and views of them."""

    def root(self, name: str) -> str:
        return _root(name, self.owner)

    def offset(self, name: str, layout: SubbufferLayout) -> int:
        """Return the offset in bytes from the start of the root's buffer."""
        total = 0
        while name in self.owner:
            if name in layout.subbuffers:
                total += layout.subbuffers[name].offset * layout.forms[name].dtype.itemsize
            name = self.owner[name]
        return total

    @staticmethod
    def of(graph: Graph, steps: Sequence[PlanStep], layout: SubbufferLayout, bound: Set[str]) -> Liveness:
        """Analyze a plan's values, except inputs `bound` to fixed tensors, which have no place in the arena."""
        end, forms = len(steps), layout.forms
        owner = {name: subbuffer.root for name, subbuffer in layout.subbuffers.items()}
        last: dict[str, int] = {}
        made_at = {step.node.name: number for number, step in enumerate(steps)}
        made_at |= {step.node.name: made_at[step.side_output.node] for step in steps if step.side_output}
        for step in steps:
            number = made_at[step.node.name]
            for name in step.node.inputs.values():
                last[name] = max(last.get(name, number), number)
            last.setdefault(step.node.name, number)
        for name in graph.outputs:
            last[name] = end
        for step in reversed(steps):  # a view keeps the bytes of its source alive
            if step.is_alias or (step.in_pytorch and operator_of(step.node).may_alias(step.node)):
                for name in step.node.inputs.values():
                    last[name] = max(last[name], last[step.node.name])
        in_pytorch = {step.node.name for step in steps if step.in_pytorch}
        inputs = {entry.name for entry in graph.inputs}
        first = dict.fromkeys(inputs, -1)
        live_until: dict[str, int] = {name: last.get(name, -1) for name in inputs}
        for name, root in owner.items():
            first[name] = made_at[name]
            first[root] = min(first.get(root, end), made_at[name], made_at.get(root, end))
            live_until[root] = max(live_until.get(root, -1), last[name], last[root])
        for number, step in enumerate(steps):
            name = step.node.name
            is_view = step.is_alias and name not in layout.in_place
            if name in first and not is_view:
                continue
            first[name] = made_at[name]
            shared = None
            if step.is_alias:
                shared = step.node.inputs["x"]
            elif step.lowered and step.lowered.in_place:
                candidate = step.node.inputs[step.lowered.in_place]
                root = _root(candidate, owner)
                # Overwrite an operand whose last reader is this step. Not an input, which may be the caller's tensor;
                # not PyTorch's memory, which the arena does not own; and not a value that the step reads in two roles.
                if (
                    root in live_until
                    and root not in inputs
                    and root not in in_pytorch
                    and live_until[root] == number
                    and forms[candidate].bytes == forms[name].bytes
                    and not forms[candidate].pitch
                    and list(step.node.inputs.values()).count(candidate) == 1
                ):
                    shared = candidate
            if shared is not None and _root(shared, owner) in first:
                owner[name] = shared
                root = _root(name, owner)
                # A buffer with subbuffers may itself become a view of another value.
                live_until[root] = max(live_until[root], last[name], live_until.pop(name, -1))
            else:
                live_until[name] = last[name]
        in_arena = {_root(name, owner) for name in graph.outputs}
        # Outputs need an address that callers and CUDA graphs know: PyTorch's results among them are copied to the
        # arena.
        not_in_arena = (in_pytorch - in_arena) | bound
        pytorch_owned = {
            name: live_until[_root(name, owner)] for name in first if _root(name, owner) in not_in_arena
        }
        live_until = {name: end for name, end in live_until.items() if name not in pytorch_owned}
        pytorch_owned = {name: end for name, end in pytorch_owned.items() if name not in bound}
        return Liveness(first, live_until, owner, pytorch_owned)


def _root(name: str, owner: Mapping[str, str]) -> str:
    while name in owner:
        name = owner[name]
    return name


def values_outside(
    graph: Graph, steps: Sequence[PlanStep], liveness: Liveness, forms: Mapping[str, Form]
) -> dict[str, str]:
    """Return the values stored in the caller's tensors, with the input or output whose bytes each shares.

    Only kernels whose pointers can be rebound read and write these. Everything else is copied from or to the arena:
    - values that PyTorch steps read or write, and values of kernels that read a PyTorch result;
    - outputs that are an input (which is copied as well), a constant, or share bytes with another output;
    - outputs whose dtype differs from the model's, unless the plan is short enough to run without an arena copy.
    """
    copied_roots = {
        liveness.root(name)
        for step in steps
        if step.in_pytorch or not liveness.pytorch_owned.keys().isdisjoint(step.node.inputs.values())
        for name in (*step.node.inputs.values(), step.node.name)
    }
    inputs = {entry.name for entry in graph.inputs}
    results = Counter(map(liveness.root, graph.outputs))
    holders = {name: name for name in inputs - copied_roots - results.keys()}
    few = few_enough_launches(steps)
    for name, dtype in zip(graph.outputs, graph.output_types, strict=True):
        root = liveness.root(name)
        if root not in liveness.live_until.keys() - inputs - copied_roots or results[root] > 1:
            continue
        as_returned = few or forms[name].dtype is getattr(torch, dtype)
        if as_returned and forms[root].bytes == forms[name].bytes:
            holders[root] = name
    all_names = (*liveness.live_until, *liveness.owner)
    return {name: holders[liveness.root(name)] for name in all_names if liveness.root(name) in holders}


def assign_arenas(
    steps: Sequence[PlanStep],
    liveness: Liveness,
    forms: Mapping[str, Form],
    persistent: Mapping[str, Workspace],
    outside: Mapping[str, str],
) -> tuple[Arena, Arena]:
    """Assign one arena to values inside the plan, and one to values outside it."""
    inner = [
        Lifetime(name, forms[name].bytes, liveness.first[name], end)
        for name, end in liveness.live_until.items()
        if name not in outside
    ]
    scratch = [
        Lifetime(step.workspace_name(workspace), workspace.bytes, number, number)
        for number, step in enumerate(steps)
        if step.recipe
        for workspace in step.recipe.workspaces
        if step.workspace_name(workspace) not in persistent
    ]
    # Lifetimes that all overlap: like the caller's tensors, these never share bytes.
    outer = [Lifetime(name, forms[name].bytes, 0, 0) for name in liveness.live_until if name in outside]
    return assign_offsets([*inner, *scratch]), assign_offsets(outer)
