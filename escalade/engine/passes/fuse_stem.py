"""Fusion of a network's first convolution with the normalization before it and the max pool after it."""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node, joint_source
from escalade.engine.nodes.base import activation_fields
from escalade.engine.nodes.conv2d import Conv2d, has_one_input
from escalade.engine.nodes.convert import Normalize
from escalade.engine.nodes.pools import MaxPool2d
from escalade.engine.nodes.stem import MAX_CHANNELS, Stem
from escalade.ops.base.dtypes import QUANTIZED

DTYPES = ("fp16", "bf16", *QUANTIZED)
MAX_FILTER_WIDTH = 8
MAX_FILTERS, FILTER_UNIT = 128, 16
_POOLS = ((3, 2, 1), (2, 2, 0))
"""Supported max pools: kernel, stride, padding."""


def fuse_stem(graph: Graph) -> None:
    """Replace every convolution of a graph input that the stem's kernels support."""
    inputs = {entry.name for entry in graph.inputs}
    for node in graph:
        if not Conv2d.matches(node) or not _is_stem(graph, node):
            continue
        image, normalization = node.inputs["x"], graph.nodes.get(node.inputs["x"])
        operands = dict(node.inputs)
        if Normalize.matches(normalization):
            if graph.only_user(normalization.name) is not node:
                continue
            image = normalization.inputs["x"]
            operands |= {role: normalization.inputs[role] for role in ("scale", "shift")}
        if image not in inputs:
            continue
        stem = Stem.instead_of(
            node, {**operands, "x": image},
            stride=node.attributes["stride"], padding=node.attributes["padding"], pool=None, **activation_fields(node),
        )  # fmt: skip
        graph.nodes[node.name] = stem
        pool = graph.only_user(node.name)
        if MaxPool2d.matches(pool) and (window := _window(pool)) in _POOLS:
            pooled = stem.with_attributes(pool=window)
            graph.nodes[node.name] = replace(pooled, shape=pool.shape, source=joint_source(stem, pool))
            graph.remove(pool, instead=stem.name)


def _is_stem(graph: Graph, node: Node) -> bool:
    filters, channels, _, filter_width = graph.constants[node.inputs["weight"]].shape
    return (
        channels <= MAX_CHANNELS
        and filter_width <= MAX_FILTER_WIDTH
        and filters % FILTER_UNIT == 0
        and filters <= MAX_FILTERS
        and node.attributes["groups"] == 1
        and node.attributes["dilation"] == (1, 1)
        and "bias" in node.inputs
        and has_one_input(node)
    )


def _window(pool: Node) -> tuple[int, ...] | None:
    """Return kernel, stride and padding of a max pool with square windows."""
    a = pool.attributes
    windows = [a[key] for key in ("kernel", "stride", "padding")]
    if a["ceil_mode"] or a["dilation"] != (1, 1) or any(rows != columns for rows, columns in windows):
        return None
    return tuple(rows for rows, _ in windows)
