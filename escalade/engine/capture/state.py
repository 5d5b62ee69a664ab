"""Models that write to what they hold: an engine computes every call alike, and takes those whose results are alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from escalade.engine.capture.model_copy import Original
from escalade.engine.capture.reader import CaptureError
from escalade.engine.graph.graph import Graph
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.evaluate import compute


def settle(graph: Graph, written: Mapping[str, str], original: Original) -> None:
    """Takes note of what the model writes to its own tensors, by the names of the constants that these are; refuses it
    where the results of the next call would be others for it.

    They are the same where they do not depend on what a tensor was before, as a counter that nobody reads, and where
    writing it again changes nothing: weights that are masked at every call.
    """
    if not written:
        return
    before = written.keys() & _origins(graph, graph.outputs)
    while further := (written.keys() & _origins(graph, [written[name] for name in before])) - before:
        before |= further
    shown = {name: graph.called.get(name, name) for name in written}
    constants = graph.constants
    read = constants.keys() & _origins(graph, [*graph.outputs, *(written[name] for name in before)])
    for name in written:  # a view of it is a constant of its own, which the graph does not write to
        if any(original.overlap(constants[name], constants[other]) for other in read - {name}):
            raise CaptureError(changed_state(shown[name]))
    if before:
        once = _computed(graph, {name: written[name] for name in before}, {})
        again = _computed(graph, {name: written[name] for name in before}, once or {})
        moved = [
            name for name in before if once is None or again is None or not _same(once[name], again[name])
        ]
        if moved:
            raise CaptureError(changed_state(shown[min(moved)]))
    graph.notes.append(
        f"the model writes to its own {', '.join(map(str, shown.values()))} when it runs; the engine's results are the "
        "same, and it leaves them as they are"
    )


def changed_state(name: str | None) -> str:
    return (
        f"the model changes its own {name} when it runs, and its next results by that; compile takes models without "
        "state"
    )


def _origins(graph: Graph, values: list[str] | tuple[str, ...]) -> set[str]:
    """All values that these come from, and themselves."""
    needed = set(values)
    for node in reversed(tuple(graph)):
        if node.name in needed:
            unread = operator_of(node).disregarded(node)
            needed.update(name for role, name in node.inputs.items() if role not in unread)
    return needed


def _computed(
    graph: Graph, written: Mapping[str, str], instead: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor] | None:
    """What is written to each constant, with others in the place of some; None if that depends on more than these."""
    part = replace(graph.copy(), outputs=tuple(written.values()))
    part.remove_dead_code()
    known = {**part.constants, **{name: tensor for name, tensor in instead.items() if name in part.constants}}
    for node in part:
        if operator_of(node).is_random(node) or node.depends_on_batch:
            return None
        if any(name not in known for name in node.inputs.values()):
            return None
        read = {role: known[name] for role, name in node.inputs.items()}
        known[node.name] = compute(node, read, graph.device)
    return (
        {name: known[value] for name, value in written.items()}
        if known.keys() >= {*written.values()}
        else None
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one, other)
