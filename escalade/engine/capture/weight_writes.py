"""Check of models that write to their own weights: an engine only supports those whose results stay the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from escalade.engine.capture.model_copy import OriginalModel
from escalade.engine.capture.reader import CaptureError
from escalade.engine.graph.graph import Graph
from escalade.engine.nodes.aten import is_random, unread_inputs
from escalade.engine.nodes.evaluate import compute


def check_weight_writes(graph: Graph, written: Mapping[str, str], original: OriginalModel) -> None:
    """Raise if what the model writes to its constants changes the results of its next call; otherwise add a note.

    `written` has the final value of each constant that the model writes to. Results stay the same if they do not depend
    on the old value, as with a counter that is never read, or if writing is idempotent: weights masked at every call.
    """
    if not written:
        return
    relevant = written.keys() & _ancestors(graph, graph.outputs)
    while more := (written.keys() & _ancestors(graph, [written[name] for name in relevant])) - relevant:
        relevant |= more
    shown = {name: graph.weight_names.get(name, name) for name in written}
    constants = graph.constants
    read = constants.keys() & _ancestors(graph, [*graph.outputs, *(written[name] for name in relevant)])
    for name in written:  # a view of it is a separate constant, which the graph does not update
        if any(original.overlap(constants[name], constants[other]) for other in read - {name}):
            raise CaptureError(state_change_message(shown[name]))
    if relevant:
        first = _written_values(graph, {name: written[name] for name in relevant}, {})
        second = _written_values(graph, {name: written[name] for name in relevant}, first or {})
        unstable = [
            name
            for name in relevant
            if first is None or second is None or not _equal(first[name], second[name])
        ]
        if unstable:
            raise CaptureError(state_change_message(shown[min(unstable)]))
    graph.notes.append(
        f"the model writes to its own {', '.join(map(str, shown.values()))} when it runs; the engine returns the same "
        "results, and leaves them unchanged"
    )


def state_change_message(name: str | None) -> str:
    return (
        f"the model changes its own {name} when it runs, and its next results depend on it; compile takes models "
        "without state: pass what changes as an input"
    )


def _ancestors(graph: Graph, values: list[str] | tuple[str, ...]) -> set[str]:
    """Return these values and all that they are computed from."""
    needed = set(values)
    for node in reversed(tuple(graph)):
        if node.name in needed:
            unread = unread_inputs(node)
            needed.update(name for role, name in node.inputs.items() if role not in unread)
    return needed


def _written_values(
    graph: Graph, written: Mapping[str, str], replaced: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor] | None:
    """Compute what is written to each constant, with some constants replaced; None if it depends on inputs."""
    subgraph = replace(graph.copy(), outputs=tuple(written.values()))
    subgraph.remove_dead_code()
    values = {
        **subgraph.constants,
        **{name: tensor for name, tensor in replaced.items() if name in subgraph.constants},
    }
    for node in subgraph:
        if is_random(node) or node.depends_on_batch:
            return None
        if any(name not in values for name in node.inputs.values()):
            return None
        read = {role: values[name] for role, name in node.inputs.items()}
        values[node.name] = compute(node, read, graph.device)
    return (
        {name: values[value] for name, value in written.items()}
        if values.keys() >= {*written.values()}
        else None
    )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype is other.dtype and torch.equal(one, other)
