"""FP8: convolutions whose inputs, weights and results are e4m3, with scales from measured ranges.

A value v is stored as v / scale, the scale chosen so that the largest magnitude seen in calibration becomes e4m3's
largest number. Weights have a scale for each filter. A convolution's sums are then multiplied back by one factor for
each filter, and its result is divided by its own scale on the way out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.quantise import Quantise
from escalade.ops.base.dtypes import E4M3_LARGEST

CHANNEL_UNIT = 16
"""Channels and filters come in multiples of this: what one 16-byte copy moves."""
SMALLEST_SCALE = 2.0**-40
"""The scale of values that were all zero."""


def quantise_convolutions(graph: Graph, ranges: Mapping[str, float]) -> None:
    """Every convolution that can be becomes one in FP8; values between two of them are stored so."""
    chosen = {node.name for node in graph if _can(graph, node, ranges)}
    scales = {name: max(largest / E4M3_LARGEST, SMALLEST_SCALE) for name, largest in ranges.items()}
    stored = {name for name in chosen if _only_read_by(graph, name, chosen)}
    copies: dict[str, str] = {}
    for name in [node.name for node in graph if node.name in chosen]:
        node = graph.nodes[name]
        inputs = dict(node.inputs)
        values = [role for role in operator_of(node).values if role in inputs]
        for role in values:
            value = inputs[role]
            if value not in stored:
                inputs[role] = _stored_copy(graph, value, scales[value], copies, before=name)
        incoming = {role: scales[node.inputs[role]] for role in values}
        inputs |= _constants(graph, node, incoming, 1 / scales[name] if name in stored else 1.0)
        graph.nodes[name] = replace(
            node.with_attributes(fp8=True, store="fp8" if name in stored else None), inputs=inputs
        )


def _can(graph: Graph, node: Node, ranges: Mapping[str, float]) -> bool:
    weights = operator_of(node).fp8_weights(node)
    sizes = [size for role in weights for size in graph.constants[node.inputs[role]].shape[:2]]
    measured = {node.name} | {node.inputs[role] for role in operator_of(node).values if role in node.inputs}
    return bool(weights) and all(size % CHANNEL_UNIT == 0 for size in sizes) and measured <= ranges.keys()


def _only_read_by(graph: Graph, name: str, chosen: set[str]) -> bool:
    readers = [node for node in graph if name in node.inputs.values()]
    return bool(readers) and name not in graph.outputs and all(node.name in chosen for node in readers)


def _stored_copy(graph: Graph, value: str, scale: float, copies: dict[str, str], before: str) -> str:
    """The value in FP8, made in front of its first reader."""
    if value not in copies:
        shape = graph.shape_of(value)
        factor = graph.add_constant(f"{value}_factor", torch.tensor([1 / scale], device="cpu"))
        name = graph.fresh(f"{value}_fp8")
        node = Quantise.node(name, {"x": value, "factor": factor}, {"store": "fp8"}, shape)
        graph.insert_before(before, node)
        copies[value] = node.name
    return copies[value]


def _constants(
    graph: Graph, node: Node, incoming: Mapping[str, float], result_scale: float
) -> dict[str, str]:
    """Weights as e4m3 can hold them, a factor for each filter, the bias in fp32, and the two scalar factors."""
    value_of = operator_of(node).fp8_weights(node)
    weights = {role: graph.constants[node.inputs[role]].double() for role in value_of}
    # One accumulator takes the products of both inputs, so both must come out in the same unit.
    unit = torch.stack(
        [weight.flatten(1).abs().amax(1) * incoming[value_of[role]] for role, weight in weights.items()]
    ).amax(0)
    unit = (unit / E4M3_LARGEST).clamp_min(SMALLEST_SCALE)
    made = {
        role: graph.add_constant(
            f"{node.name}_{role}_fp8", (weight * incoming[value_of[role]] / unit.view(-1, 1, 1, 1)).float()
        )
        for role, weight in weights.items()
    }
    scales = torch.tensor([incoming.get("residual", 0.0), result_scale], device="cpu")
    bias = graph.constants[node.inputs["bias"]] if "bias" in node.inputs else torch.zeros_like(unit)
    return made | {
        "bias": graph.add_constant(f"{node.name}_bias_fp8", bias.float()),
        "scale": graph.add_constant(f"{node.name}_scale", unit.float()),
        "scales": graph.add_constant(f"{node.name}_scales", scales),
    }
