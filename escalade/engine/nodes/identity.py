"""PyTorch's operators that change nothing in a plan: their result is the value that they are given."""

from __future__ import annotations

import torch

from escalade.engine.graph.graph import ATEN, Graph, Node, Reference
from escalade.engine.nodes.aten_call import AtenCall, name_of
from escalade.engine.nodes.base import Recognised, Recogniser


def holds_as(node: Node, x: str, graph: Graph) -> bool:
    """Whether a plan keeps a value in the type that the node gives."""
    dtype, wanted = graph.dtype_of(x), getattr(torch, node.dtype)
    if graph.typed or torch.float64 in (dtype, wanted):
        return dtype is wanted
    return dtype.is_floating_point


def is_rounding(node: Node, graph: Graph) -> bool:
    """Return whether a call of an untyped graph rounds wider floating values to 16 bits, and does nothing else."""
    if graph.typed or node.op != ATEN or name_of(node.attributes["target"]) not in ("to", "_to_copy"):
        return False
    given = node.attributes["arguments"].get("self")
    source = graph.dtype_of(node.inputs[given.role]) if isinstance(given, Reference) else None
    is_wide = source is not None and source.is_floating_point and source.itemsize > 2
    return is_wide and getattr(torch, node.dtype) in (torch.float16, torch.bfloat16)


def _same(node: Node, call: AtenCall, graph: Graph) -> Recognised:
    x = call.value("self") or call.value("input")
    return x if x is not None and graph.shape_of(x) == node.shape else None


def _broadcast(node: Node, call: AtenCall, graph: Graph) -> Recognised:
    """One of several tensors, which may have the common size already."""
    x = node.inputs[call("tensors")[node.attributes["result"]].role]
    return x if graph.shape_of(x) == node.shape else None


def _dropout(node: Node, call: AtenCall, graph: Graph) -> Recognised:
    return None if call("train", call("training", False)) else _same(node, call, graph)


def _to(node: Node, call: AtenCall, graph: Graph) -> Recognised:
    """A cast from one floating type to another, which is nothing where the plan has one of its own. One to 16 bits
    rounds: a plan of 32 bits does so too."""
    x = call.value("self")
    if x is None or not node.is_floating or x in graph.constants:
        return None
    if is_rounding(node, graph):
        return node
    return x if holds_as(node, x, graph) else None


def _copied(node: Node, call: AtenCall, graph: Graph) -> Recognised:
    """What is written over all of another value, in the plan's own type as that one."""
    x = call.value("src")
    if x is None or x in graph.constants or not node.is_floating or graph.shape_of(x) != node.shape:
        return None
    return x if holds_as(node, x, graph) else None


IDENTITIES: dict[str, Recogniser] = {
    **dict.fromkeys(("dropout", "dropout2d", "feature_dropout", "native_dropout"), _dropout),
    **dict.fromkeys(
        ("contiguous", "clone", "detach", "alias", "lift_fresh_copy", "expand", "expand_as"), _same
    ),
    "broadcast_tensors": _broadcast,
    "to": _to,
    "_to_copy": _to,
    "copy": _copied,
}
"""What recognises each, by the name of PyTorch's operator."""
