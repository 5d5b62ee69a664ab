"""Merge of convolutions: of those that read one image, and of a shortcut with the convolution that it is added to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from escalade.engine.graph.graph import Graph, Node, joint_source
from escalade.engine.nodes import operator_of, stored_forms
from escalade.engine.nodes.attention import Attention
from escalade.engine.nodes.base import activation_of, with_channels
from escalade.engine.nodes.conv2d import Conv2d, has_one_input
from escalade.engine.nodes.lowering import Forms
from escalade.engine.nodes.views import Concatenate, Slice
from escalade.engine.passes.carried_ranges import with_carried_range
from escalade.engine.passes.estimates import Estimates
from escalade.ops.base.dtypes import VECTOR_BYTES


def merge_parallel_convs(graph: Graph, dtype: str, estimates: Estimates) -> None:
    """Merge convolutions of one image that differ only in their filters, where the estimates favor it.

    Readers take a slice of the merged channels. Convolutions that are part of a concatenation are skipped: a value
    cannot be a part of two buffers.
    """
    for convs in _sibling_groups(graph):
        merged = _merge(convs, graph)
        if merged is None or not _is_faster(convs, merged, graph, dtype, estimates):
            continue
        graph.insert_before(convs[0].name, merged)
        offset = 0
        for node in convs:
            graph.nodes[node.name] = Slice.instead_of(node, {"x": merged.name}, dimension=1, first=offset)
            offset += _channels(node)


def _sibling_groups(graph: Graph) -> list[list[Node]]:
    """Return groups of convolutions with the same input and attributes, whose readers can read a slice."""
    users = graph.users()
    groups: dict[tuple[object, ...], list[Node]] = {}
    for node in graph:
        readers = users.get(node.name, [])
        if not _is_mergeable(node) or node.name in graph.outputs or not readers:
            continue
        if any(Concatenate.matches(reader) or Slice.matches(reader) for reader in readers):
            continue
        key = (
            node.inputs.get("x"),
            repr(sorted(node.attributes.items())),
            tuple(node.inputs),
            node.shape[2:],
        )
        groups.setdefault(key, []).append(node)
    return [nodes for nodes in groups.values() if len(nodes) > 1]


def _is_mergeable(node: Node) -> bool:
    if not Conv2d.matches(node) or node.attributes["groups"] != 1 or node.attributes.get("quantized"):
        return False
    return {"x", "weight"} <= node.inputs.keys() <= {"x", "weight", "bias"}


def _merge(convs: Sequence[Node], graph: Graph) -> Node | None:
    """Return a convolution with the filters of all of these; None if their filters differ in size."""
    first = convs[0]
    if len({graph.constants[node.inputs["weight"]].shape[1:] for node in convs}) > 1:
        return None
    roles = [role for role in ("weight", "bias") if role in first.inputs]
    joined = {role: torch.cat([graph.constants[node.inputs[role]] for node in convs]) for role in roles}
    constants = graph.add_constants(f"{first.name}_joined", joined)
    wide = with_channels(first, graph.constants[constants["weight"]].shape[0])
    return replace(
        wide.with_inputs(**constants), name=graph.fresh(f"{first.name}_joined"), source=joint_source(*convs)
    )


def _channels(node: Node) -> int:
    channels = node.shape[1]
    assert isinstance(channels, int)
    return channels


def _is_faster(convs: Sequence[Node], merged: Node, graph: Graph, dtype: str, estimates: Estimates) -> bool:
    """Return True if the merged layer, with readers of strided pixels, is estimated to take less time."""
    stored = stored_forms(graph, dtype)
    forms = Forms(dtype, stored, graph.constants)
    form = stored[convs[0].name]
    # A slice of channels must begin at a multiple of 16 bytes in every pixel, for vector loads.
    if form.layout != "nhwc" or any(_channels(node) * form.dtype.itemsize % VECTOR_BYTES for node in convs):
        return False
    users = graph.users()
    readers = [
        (reader, node.name)
        for node in convs
        for reader in users[node.name]
        if not _only_attention_reads(reader, users, forms, estimates)  # through any strides
    ]
    before = estimates.total_us([*convs, *(reader for reader, _ in readers)], forms)
    after = estimates.total_us([merged], forms)
    if before is None or after is None:
        return False
    for reader, value in readers:
        pitches = dict.fromkeys(reader.roles_of(value), _channels(merged))
        choice = estimates.choice(reader, forms, pitches, exact=True) if len(pitches) == 1 else None
        if choice is None:
            return False
        after += estimates.us(choice)
    return after < before


def _only_attention_reads(
    view: Node, users: Mapping[str, list[Node]], forms: Forms, estimates: Estimates
) -> bool:
    """Return True for a view that only kernels of attention read, as they are or through further views."""
    readers = users.get(view.name, [])
    if not readers or not operator_of(view).may_alias(view):
        return False
    return all(
        estimates.choice(reader, forms) is not None
        if Attention.matches(reader)
        else _only_attention_reads(reader, users, forms, estimates)
        for reader in readers
    )


CHANNEL_UNIT = 8  # channels of both inputs must fill 16-byte loads of 16-bit values


def fuse_shortcuts(graph: Graph) -> None:
    """Replace conv(x) + conv1x1(s) by one convolution that accumulates the products of both.

    The shortcut's result is neither written nor read.
    """
    for node in graph:
        if not Conv2d.matches(node) or "residual" not in node.inputs:
            continue
        if "residual" in activation_of(node).inputs:
            continue  # used in other ways than a plain addition
        shortcut = graph.nodes.get(node.inputs["residual"])
        if not Conv2d.matches(shortcut) or not _is_shortcut(graph, shortcut, node):
            continue
        fused = node.with_inputs(
            shortcut=shortcut.inputs["x"],
            shortcut_weight=shortcut.inputs["weight"],
            bias=_joint_bias(graph, node, shortcut),
            residual=None,
        ).with_attributes(shortcut_stride=shortcut.attributes["stride"][0])
        fused = with_carried_range(fused, shortcut, "shortcut")
        graph.nodes[node.name] = replace(fused, source=joint_source(node, shortcut))
        del graph.nodes[shortcut.name]


def _is_shortcut(graph: Graph, shortcut: Node, node: Node) -> bool:
    if not activation_of(shortcut).is_identity or not has_one_input(shortcut):
        return False
    if graph.only_user(shortcut.name) is not node:
        return False
    a, weight = shortcut.attributes, graph.constants[shortcut.inputs["weight"]]
    channels = weight.shape[1], graph.constants[node.inputs["weight"]].shape[1]
    return (
        tuple(weight.shape[2:]) == (1, 1)
        and a["stride"][0] == a["stride"][1]
        and a["padding"] == (0, 0)
        and a["groups"] == node.attributes["groups"] == 1
        and all(count % CHANNEL_UNIT == 0 for count in channels)
    )


def _joint_bias(graph: Graph, node: Node, shortcut: Node) -> str | None:
    biases = [layer.inputs["bias"] for layer in (node, shortcut) if "bias" in layer.inputs]
    if len(biases) < 2:
        return biases[0] if biases else None
    both = graph.constants[biases[0]].double() + graph.constants[biases[1]].double()
    return graph.add_constant(f"{node.name}_bias", both.float())
