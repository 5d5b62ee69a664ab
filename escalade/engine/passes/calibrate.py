"""Calibration for quantized dtypes: ranges of a network's values on real data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from escalade.engine.graph.graph import KEPT, Batch, Graph
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.evaluate import compute, own_arithmetic
from escalade.engine.passes.histograms import Histogram
from escalade.errors import UnsupportedError
from escalade.terminal_text import counted

MAX_BATCHES = 64  # ranges converge long before


def histograms(graph: Graph, batches: Iterable[Any], device: torch.device) -> dict[str, Histogram]:
    """Return the magnitudes of every value over these batches of inputs."""
    constants = {name: tensor.to(device) for name, tensor in graph.constants.items()}
    found: dict[str, Histogram] = {}
    seen = 0
    if not isinstance(batches, Iterable):
        raise UnsupportedError(f"calibration is of type {type(batches).__name__}; pass a list of batches")
    for batch in batches:
        inputs = (batch,) if isinstance(batch, torch.Tensor) else batch
        if not isinstance(inputs, Sequence) or not all(isinstance(tensor, torch.Tensor) for tensor in inputs):
            raise UnsupportedError(
                f"a calibration batch is of type {type(batch).__name__}; pass a tensor, or a tuple of tensors if the "
                "model takes several"
            )
        if len(inputs) != len(graph.inputs):
            raise UnsupportedError(
                f"calibration batch of {counted(len(inputs), 'tensor')}; the model takes {len(graph.inputs)}"
            )
        _add_batch(found, graph, constants, [tensor.to(device) for tensor in inputs])
        seen += 1
        if seen == MAX_BATCHES:
            break
    if not seen:
        raise UnsupportedError("calibration has no batches; pass a few that are representative of the data")
    return found


def _add_batch(
    found: dict[str, Histogram], graph: Graph, constants: dict[str, torch.Tensor], inputs: list[torch.Tensor]
) -> None:
    concrete = graph.at(_batch(graph, inputs))
    values: dict[str, torch.Tensor] = dict(constants)
    for entry, tensor in zip(concrete.inputs, inputs, strict=True):
        if tuple(tensor.shape) != entry.shape:
            raise UnsupportedError(f"calibration batch has shape {tuple(tensor.shape)}; pass {entry.shape}")
        values[entry.name] = tensor.float() if getattr(torch, entry.dtype).is_floating_point else tensor
    device = inputs[0].device
    with own_arithmetic("fp32", device):
        for node in concrete:
            result = compute(node, {role: values[name] for role, name in node.inputs.items()}, device)
            values[node.name] = result
            if result.is_floating_point() and result.numel():
                if not bool(torch.isfinite(result).all()):
                    raise UnsupportedError(
                        f"values are not finite in calibration, first at {node.source or node.name}; check the "
                        "calibration batches, or use fp16"
                    )
                found.setdefault(node.name, Histogram.empty()).add(result)


def _batch(graph: Graph, inputs: list[torch.Tensor]) -> int:
    for entry, tensor in zip(graph.inputs, inputs, strict=True):
        if entry.shape and isinstance(entry.shape[0], Batch) and tensor.dim():
            return tensor.shape[0] // entry.shape[0].times
    return 1


def transfer_ranges(measured: Graph, fused: Graph) -> dict[str, float]:
    """Transfer ranges to a fused graph for other input sizes, if it has the same nodes."""
    names = {old.name: new.name for old, new in zip(measured.inputs, fused.inputs, strict=True)}
    same = len(measured.nodes) == len(fused.nodes)
    for old, new in zip(measured, fused):  # noqa: B905
        reads = {role: names.get(name) for role, name in old.inputs.items()}
        same &= operator_of(old) is operator_of(new) and reads == {
            role: name if name in names.values() else None for role, name in new.inputs.items()
        }
        names[old.name] = new.name
    if not same:
        raise UnsupportedError(
            "the ranges were measured with inputs of other sizes, for which the graph differs; compile "
            "it again with calibration batches of this size"
        )
    kept = {name: range for name, range in measured.ranges.items() if name.startswith(KEPT)}
    return kept | {names[name]: range for name, range in measured.ranges.items() if name in names}
