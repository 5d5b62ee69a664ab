"""Fit a training step into a memory budget: recompute cheap activations in the backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.aten import is_random
from escalade.engine.nodes.batch_norm import BatchNorm
from escalade.engine.nodes.norms import LayerNorm
from escalade.engine.nodes.side_outputs import side_outputs_of
from escalade.engine.passes.step_recompute import Candidate, Span, choose, fused_candidates, write_again
from escalade.engine.plan.plan import Plan, PlanStep
from escalade.errors import UnsupportedError
from escalade.ops.base.card import Card

_MOST_ROUNDS = 4
"""Maximum number of replans: fragmentation makes the arena larger than the live bytes at the peak."""


def fit_memory(graph: Graph, plan_of: Callable[[Graph], Plan], budget: int, card: Card) -> Graph:
    """Return the graph with activations recomputed, so that the plan's arena has at most `budget` bytes."""
    least = first = plan_of(graph)
    # A side output of a gradient kernel is the cheaper way, but may extend other live ranges. A second copy of the node
    # takes more time, but may take less memory.
    for fused in (True, False):
        found, plan = graph, first
        for _ in range(_MOST_ROUNDS):
            if plan.arena_bytes <= budget:
                return found
            chosen = _choose(plan, budget - (plan.arena_bytes - max(_live_bytes(plan))), card, fused=fused)
            if not chosen:
                break
            found = _with_copies(found, plan, chosen)
            plan = plan_of(found)
        if plan.arena_bytes <= budget:
            return found
        least = min(least, plan, key=lambda one: one.arena_bytes)
    raise UnsupportedError(
        f"memory={budget}: the values of this step take at least {least.arena_bytes} bytes at this batch size, even if "
        "cheap activations are recomputed; pass more memory or a smaller batch"
    )


def _with_copies(graph: Graph, plan: Plan, chosen: Sequence[Candidate]) -> Graph:
    graph = graph.copy()
    views = _views(plan)
    for candidate in chosen:
        if candidate.host:
            write_again(graph, candidate)
        else:
            late = [step.node.name for step in plan.steps[candidate.end :]]
            _compute_again(graph, candidate.name, late, views)
    graph.remove_dead_code()  # views that nothing reads any more would keep their sources alive
    return graph


def _live_bytes(plan: Plan) -> list[int]:
    """Return the live bytes per step."""
    live = [0] * (len(plan.steps) + 1)
    for one in plan.lifetimes:
        for step in range(max(one.first, 0), min(one.last, len(plan.steps)) + 1):
            live[step] += one.bytes
    return live


def _choose(plan: Plan, budget: int, card: Card, *, fused: bool) -> list[Candidate]:
    """Choose candidates until the live bytes fit the budget; the most bytes saved per microsecond first."""
    spans = {one.name: Span(one.first, one.last, one.bytes) for one in plan.lifetimes}
    places = {step.node.name: number for number, step in enumerate(plan.steps)}
    kernels = {step.node.name for step in plan.steps if step.recipe}
    left = list(_candidates(plan, places, card))
    if fused:
        hosted = fused_candidates(plan.graph, spans, card.transfer_us, places)
        left += (one for one in hosted if one.host in kernels)
    chosen: list[Candidate] = []
    for best in choose(_live_bytes(plan), left, budget, math.inf):
        # A recomputed value has a shorter live range than the candidates that read it assume.
        left[:] = [one for one in left if not _conflict(plan, one, best)]
        chosen.append(best)
    return chosen


def _conflict(plan: Plan, one: Candidate, other: Candidate) -> bool:
    if one.name == other.name:
        return True
    return not (one.host or other.host) and _depends(plan, one.name, other.name)


def _depends(plan: Plan, name: str, other: str) -> bool:
    nodes, views = plan.graph.nodes, _views(plan)
    return other in _sources(plan, nodes[name], views) or name in _sources(plan, nodes[other], views)


def _views(plan: Plan) -> frozenset[str]:
    """Return the values that alias their input."""
    return frozenset(step.node.name for step in plan.steps if step.is_alias)


def _sources(plan: Plan, node: Node, views: frozenset[str]) -> set[str]:
    """Return the values that a node reads, with views replaced by their sources."""
    found = set()
    for name in node.inputs.values():
        while name in views:
            name = plan.graph.nodes[name].inputs["x"]
        found.add(name)
    return found


def _candidates(plan: Plan, positions: Mapping[str, int], card: Card) -> Iterator[Candidate]:
    """Yield the cheap values, each with its longest gap between readers."""
    lifetimes, views = {one.name: one for one in plan.lifetimes}, _views(plan)
    for number, step in enumerate(plan.steps):
        own = lifetimes.get(step.node.name)
        if own is None or own.last >= len(plan.steps) or not _is_cheap(plan, step):
            continue
        uses = sorted({number, *(positions[one.name] for one in _readers(plan.graph, step.node.name, views))})
        early, late = max(pairwise(uses), key=lambda pair: pair[1] - pair[0], default=(0, 0))
        extended = []
        for name in _sources(plan, step.node, views):
            source = lifetimes.get(name)
            if source is not None and source.last < late:
                extended.append(Span(source.last, late, source.bytes))
            elif source is None and name in plan.graph.nodes:
                break  # stored in another value's buffer or by PyTorch's allocator
        else:
            assert step.lowered is not None
            us = card.microseconds(0, step.lowered.problem.bytes)
            yield Candidate(step.node.name, own.bytes, early, late, tuple(extended), us)


def _is_cheap(plan: Plan, step: PlanStep) -> bool:
    """Return True for pointwise functions, LayerNorm, and BatchNorm with given statistics, if kernels compute them."""
    node = step.node
    if step.lowered is None or step.side_output is not None or is_random(node):
        return False
    if side_outputs_of(node, plan.graph):
        return False
    is_norm = BatchNorm.matches(node) or LayerNorm.matches(node)
    return is_norm or operator_of(node).expression(node) is not None


def _readers(graph: Graph, name: str, views: frozenset[str]) -> Iterator[Node]:
    """Yield the nodes that read a value or a view of it, without the views."""
    for reader in graph.readers(name):
        if reader.name in views:
            yield from _readers(graph, reader.name, views)
        else:
            yield reader


def _compute_again(graph: Graph, name: str, late: Sequence[str], views: frozenset[str]) -> None:
    """Let later nodes read a second copy of a value, computed right before the first of them."""
    order = {later: number for number, later in enumerate(late)}
    readers = [one.name for one in _readers(graph, name, views) if one.name in order]
    first = min(readers, key=order.__getitem__)

    def again(original: str, **inputs: str) -> str:
        copy = replace(graph.nodes[original].with_inputs(**inputs), name=graph.fresh(f"{original}_again"))
        graph.insert_before(first, copy)
        return copy.name

    def redirect(original: str, copy: str) -> None:
        for reader in graph.readers(original):
            if reader.name in views:
                if any(one.name in order for one in _readers(graph, reader.name, views)):
                    redirect(reader.name, again(reader.name, x=copy))
            elif reader.name in order:
                inputs = {role: copy if value == original else value for role, value in reader.inputs.items()}
                graph.nodes[reader.name] = reader.with_inputs(**inputs)

    redirect(name, again(name))
