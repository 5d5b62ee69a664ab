"""FP8 quantization: convolutions with e4m3 inputs, weights and results, scaled by measured ranges.

A value v is stored as v / scale, where scale maps the largest magnitude seen in calibration to the largest e4m3 number.
Weights have one scale per filter. The epilogue multiplies accumulators by one factor per filter, and divides the result
by its own scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.conv2d import Conv2d
from escalade.engine.nodes.convert import Quantize
from escalade.ops.base.dtypes import E4M3_LARGEST

CHANNEL_UNIT = 16  # channels and filters must be multiples of one 16-byte access
SMALLEST_SCALE = 2.0**-40  # scale of values that were all zero


def quantize_convolutions(graph: Graph, ranges: Mapping[str, float]) -> None:
    """Convert every quantizable convolution to FP8, and store values between two of them in FP8."""
    quantized = {node.name for node in graph if _is_quantizable(graph, node, ranges)}
    scales = {name: max(largest / E4M3_LARGEST, SMALLEST_SCALE) for name, largest in ranges.items()}
    stored_fp8 = {name for name in quantized if _is_only_read_by(graph, name, quantized)}
    copies: dict[str, str] = {}
    for name in [node.name for node in graph if node.name in quantized]:
        node = graph.nodes[name]
        inputs = dict(node.inputs)
        values = [role for role in operator_of(node).values if role in inputs]
        for role in values:
            value = inputs[role]
            if value not in stored_fp8:
                inputs[role] = _fp8_copy(graph, value, scales[value], copies, before=name)
        input_scales = {role: scales[node.inputs[role]] for role in values}
        inputs |= _fp8_constants(graph, node, input_scales, 1 / scales[name] if name in stored_fp8 else 1.0)
        fp8_node = node.with_attributes(fp8=True, store="fp8" if name in stored_fp8 else None)
        graph.nodes[name] = replace(fp8_node, inputs=inputs)


def _is_quantizable(graph: Graph, node: Node, ranges: Mapping[str, float]) -> bool:
    weights = fp8_weights(node)
    sizes = [size for role in weights for size in graph.constants[node.inputs[role]].shape[:2]]
    measured = {node.name} | {node.inputs[role] for role in operator_of(node).values if role in node.inputs}
    return bool(weights) and all(size % CHANNEL_UNIT == 0 for size in sizes) and measured <= ranges.keys()


def fp8_weights(node: Node) -> dict[str, str]:
    """Return the roles of a node's weights, each with that of its input; empty if no FP8 kernel computes the node."""
    if not Conv2d.matches(node) or node.attributes["groups"] != 1:
        return {}
    inputs = {"weight": "x", "shortcut_weight": "shortcut"}
    return {weight: value for weight, value in inputs.items() if weight in node.inputs}


def _is_only_read_by(graph: Graph, name: str, quantized: set[str]) -> bool:
    readers = [node for node in graph if name in node.inputs.values()]
    return bool(readers) and name not in graph.outputs and all(node.name in quantized for node in readers)


def _fp8_copy(graph: Graph, value: str, scale: float, copies: dict[str, str], before: str) -> str:
    """Return an FP8 copy of a value, created before its first reader."""
    if value not in copies:
        shape = graph.shape_of(value)
        factor = graph.add_constant(f"{value}_factor", torch.tensor([1 / scale], device="cpu"))
        name = graph.fresh(f"{value}_fp8")
        node = Quantize.node(name, {"x": value, "factor": factor}, {"store": "fp8"}, shape)
        graph.insert_before(before, node)
        copies[value] = node.name
    return copies[value]


def _fp8_constants(
    graph: Graph, node: Node, input_scales: Mapping[str, float], result_scale: float
) -> dict[str, str]:
    """Add the scaled weights, a factor per filter, the fp32 bias, and the scales of residual and result."""
    inputs_of = fp8_weights(node)
    weights = {role: graph.constants[node.inputs[role]].double() for role in inputs_of}
    # Products of both inputs are summed in one accumulator, so they need a common scale.
    unit = torch.stack(
        [weight.flatten(1).abs().amax(1) * input_scales[inputs_of[role]] for role, weight in weights.items()]
    ).amax(0)
    unit = (unit / E4M3_LARGEST).clamp_min(SMALLEST_SCALE)
    quantized_weights = {
        role: graph.add_constant(
            f"{node.name}_{role}_fp8",
            (weight * input_scales[inputs_of[role]] / unit.view(-1, 1, 1, 1)).float(),
        )
        for role, weight in weights.items()
    }
    scales = torch.tensor([input_scales.get("residual", 0.0), result_scale], device="cpu")
    bias = graph.constants[node.inputs["bias"]] if "bias" in node.inputs else torch.zeros_like(unit)
    return quantized_weights | {
        "bias": graph.add_constant(f"{node.name}_bias_fp8", bias.float()),
        "scale": graph.add_constant(f"{node.name}_scale", unit.float()),
        "scales": graph.add_constant(f"{node.name}_scales", scales),
    }
