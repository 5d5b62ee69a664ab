"""The ranges of a network's values on real data, for FP8."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from escalade.engine.graph import Batch, Graph
from escalade.engine.reference import compute
from escalade.errors import UnsupportedError

MOST_BATCHES = 64
"""More are not looked at: ranges settle long before."""


def ranges(graph: Graph, batches: Iterable[Any], device: torch.device) -> dict[str, float]:
    """The largest magnitude of every value, over batches of inputs as the engine will be given them."""
    constants = {name: tensor.to(device) for name, tensor in graph.constants.items()}
    largest: dict[str, float] = {}
    seen = 0
    for batch in batches:
        given = (batch,) if isinstance(batch, torch.Tensor) else tuple(batch)
        if len(given) != len(graph.inputs):
            raise UnsupportedError(
                f"a calibration batch of {len(given)} tensors; the model takes {len(graph.inputs)}"
            )
        _update(largest, graph, constants, [tensor.to(device).float() for tensor in given])
        seen += 1
        if seen == MOST_BATCHES:
            break
    if not seen:
        raise UnsupportedError("calibration has no batches; give a few that look like the data to come")
    bad = [name for name, value in largest.items() if value != value or value == float("inf")]
    if bad:
        raise UnsupportedError(f"calibration met values that are not finite, first at {bad[0]}")
    return largest


def _update(
    largest: dict[str, float], graph: Graph, constants: dict[str, torch.Tensor], given: list[torch.Tensor]
) -> None:
    first = next((entry.shape[0] for entry in graph.inputs if isinstance(entry.shape[0], Batch)), None)
    size = given[0].shape[0] // first.times if first is not None else 1
    concrete = graph.at(size)
    values: dict[str, torch.Tensor] = dict(constants)
    for entry, tensor in zip(concrete.inputs, given, strict=True):
        if tuple(tensor.shape) != entry.shape:
            raise UnsupportedError(
                f"a calibration batch has shape {tuple(tensor.shape)}; the model takes {entry.shape}"
            )
        values[entry.name] = tensor
    with torch.no_grad():
        for node in concrete:
            result = compute(node, {role: values[name] for role, name in node.inputs.items()})
            values[node.name] = result
            if result.is_floating_point() and result.numel():
                largest[node.name] = max(largest.get(node.name, 0.0), float(result.abs().max()))
