"""The ranges of a network's values on real data, for FP8."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from escalade.engine.graph.graph import Batch, Graph
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.arithmetic import own_arithmetic
from escalade.engine.nodes.evaluate import compute
from escalade.errors import UnsupportedError

MOST_BATCHES = 64
"""Batches that are looked at at most: ranges settle long before."""


def ranges(graph: Graph, batches: Iterable[Any], device: torch.device) -> dict[str, float]:
    """The largest magnitude of every value, over batches of inputs as the engine will be given them."""
    constants = {name: tensor.to(device) for name, tensor in graph.constants.items()}
    largest: dict[str, float] = {}
    seen = 0
    if not isinstance(batches, Iterable):
        raise UnsupportedError(f"calibration is of type {type(batches).__name__}; it takes a list of batches")
    for batch in batches:
        given = (batch,) if isinstance(batch, torch.Tensor) else batch
        if not isinstance(given, Sequence) or not all(isinstance(each, torch.Tensor) for each in given):
            raise UnsupportedError(
                f"a calibration batch is of type {type(batch).__name__}; it is a tensor, or a tuple of them where the "
                "model takes several"
            )
        if len(given) != len(graph.inputs):
            raise UnsupportedError(
                f"a calibration batch of {len(given)} tensors; the model takes {len(graph.inputs)}"
            )
        _update(largest, graph, constants, [tensor.to(device) for tensor in given])
        seen += 1
        if seen == MOST_BATCHES:
            break
    if not seen:
        raise UnsupportedError("calibration has no batches; give a few that look like the data to come")
    return largest


def _update(
    largest: dict[str, float], graph: Graph, constants: dict[str, torch.Tensor], given: list[torch.Tensor]
) -> None:
    concrete = graph.at(_batch(graph, given))
    values: dict[str, torch.Tensor] = dict(constants)
    for entry, tensor in zip(concrete.inputs, given, strict=True):
        if tuple(tensor.shape) != entry.shape:
            raise UnsupportedError(
                f"a calibration batch has shape {tuple(tensor.shape)}; the model takes {entry.shape}"
            )
        values[entry.name] = tensor.float() if getattr(torch, entry.dtype).is_floating_point else tensor
    device = given[0].device
    with own_arithmetic("fp32", device):
        for node in concrete:
            result = compute(node, {role: values[name] for role, name in node.inputs.items()}, device)
            values[node.name] = result
            if result.is_floating_point() and result.numel():
                here = float(result.abs().max())
                if not math.isfinite(here):
                    raise UnsupportedError(
                        f"calibration met values that are not finite, first at {node.source or node.name}"
                    )
                largest[node.name] = max(largest.get(node.name, 0.0), here)


def _batch(graph: Graph, given: list[torch.Tensor]) -> int:
    for entry, tensor in zip(graph.inputs, given, strict=True):
        if entry.shape and isinstance(entry.shape[0], Batch) and tensor.dim():
            return tensor.shape[0] // entry.shape[0].times
    return 1


def carried_ranges(measured: Graph, fused: Graph) -> dict[str, float]:
    """The ranges of a fused graph that were measured on one for inputs of other sizes, if both do the same."""
    names = {first.name: other.name for first, other in zip(measured.inputs, fused.inputs, strict=True)}
    same = len(measured.nodes) == len(fused.nodes)
    for first, other in zip(measured, fused):  # noqa: B905
        reads = {role: names.get(name) for role, name in first.inputs.items()}
        same &= operator_of(first) is operator_of(other) and reads == {
            role: name if name in names.values() else None for role, name in other.inputs.items()
        }
        names[first.name] = other.name
    if not same:
        raise UnsupportedError(
            "the ranges of fp8 were measured with inputs of other sizes, with which the model does something else; "
            "compile it again with calibration batches of this size"
        )
    return {names[name]: range for name, range in measured.ranges.items() if name in names}
