"""Matching of PyTorch operators to graph operators, by the rules that these declare."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from escalade.engine.graph.forms import TENSOR_CORE_DTYPES
from escalade.engine.graph.graph import Graph, Node, name_of
from escalade.engine.nodes import OPERATORS
from escalade.engine.nodes.aten import IDENTITIES
from escalade.engine.nodes.base import CAPTURE, FOLDED, UNFUSED, VOLUMES, AtenCall, Matcher
from escalade.engine.nodes.composites import (
    COMPOSITES,
    FOLDED_COMPOSITES,
    VOLUME_COMPOSITES,
    composite_matcher,
)
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.reduce import Reduce
from escalade.engine.nodes.views import on_sequences


def _matchers(phase: str) -> dict[str, Matcher]:
    return {
        rule.name: on_sequences(matcher, *rule.sequence) if rule.sequence else matcher
        for operator in OPERATORS
        for rule, matcher in operator.rules(phase)
    }


MATCHERS: dict[str, Matcher] = {**_matchers(CAPTURE), **IDENTITIES}
_FOLDED_MATCHERS, _UNFUSED_MATCHERS = _matchers(FOLDED), _matchers(UNFUSED)
_VOLUME_MATCHERS = _matchers(VOLUMES)
_COMPOSITES: dict[str, Matcher] = {
    name: composite_matcher(composite, lambda *call: match_captured(*call))
    for name, composite in COMPOSITES.items()
}
_FOLDED_COMPOSITES: dict[str, Matcher] = {
    name: composite_matcher(composite, lambda *call: match_captured(*call))
    for name, composite in FOLDED_COMPOSITES.items()
}
_VOLUME_COMPOSITES: dict[bool, dict[str, Matcher]] = {
    nhwc: {
        name: composite_matcher(composite, lambda *call: match_captured(*call))
        for name, composite in composites.items()
    }
    for nhwc, composites in VOLUME_COMPOSITES.items()
}
_FALLBACKS: tuple[Matcher, ...] = (Pointwise().match, Reduce().match)
"""Matchers of calls that no operator matches by name."""


def match_captured(node: Node, target: torch._ops.OpOverload, graph: Graph) -> Node | str:
    """Return a captured call as a node of ours, as it is, or, for a no-op, as the name of its operand."""
    if _is_empty(node, graph):
        return node
    name = name_of(target.name())
    node = _with_fp32_scalars(node, graph)
    if _is_double(node, graph):
        identity = IDENTITIES.get(name)
        return (None if identity is None else identity(node, AtenCall(node), graph)) or node
    if name.endswith("_") and name[:-1] in MATCHERS:
        name = name[:-1]  # relu_ is relu with a new result
    call, matcher = AtenCall(node), MATCHERS.get(name)
    known = matcher(node, call, graph) if matcher is not None else None
    if known is None and name in _COMPOSITES:
        known = _COMPOSITES[name](node, call, graph)
    others = (fallback(node, call, graph) for fallback in _FALLBACKS) if known is None else ()
    return known or next((other for other in others if other is not None), node)


def match_folded(graph: Graph) -> None:
    """Match layers and matrix products whose weights the model computes; these are constants now."""
    _match_again(graph, _FOLDED_MATCHERS, _FOLDED_COMPOSITES)


def match_volumes(graph: Graph, dtype: str) -> None:
    """Match layers on volumes, as layers on images.

    Convolutions, which tensor cores compute in NDHWC, are PyTorch's in fp32, and volumes are NCDHW then. In a typed
    graph `dtype` is the one in which fp32 is multiplied.
    """
    kinds = {node.dtype for node in graph if node.calls in _VOLUME_MATCHERS} if graph.typed else set()
    nhwc = dtype in TENSOR_CORE_DTYPES or not kinds.isdisjoint(("float16", "bfloat16"))
    _match_again(graph, _VOLUME_COMPOSITES[nhwc], *((_VOLUME_MATCHERS,) if nhwc else ()))


def match_unfused(graph: Graph) -> None:
    """Match the logarithms of softmax, and their gradients, that no loss was fused with."""
    _match_again(graph, _UNFUSED_MATCHERS)


def _match_again(graph: Graph, *tables: Mapping[str, Matcher]) -> None:
    for node in graph:
        matchers = [each.get(node.calls) for each in tables]
        if not any(matchers) or _is_empty(node, graph) or _is_double(node, graph):
            continue
        before = set(graph.nodes)
        call = AtenCall(node)
        known = next((found for match in matchers if match and (found := match(node, call, graph))), None)
        for added in [other for other in graph if other.name not in before]:
            # Matchers append the nodes that they read to the graph that is captured so far.
            del graph.nodes[added.name]
            graph.insert_before(node.name, added)
        if isinstance(known, str):
            graph.remove(node, instead=known)
        else:
            graph.nodes[node.name] = known or node


def _is_empty(node: Node, graph: Graph) -> bool:
    """Return True if a node returns or reads a value without elements; PyTorch defines its result."""
    return 0 in node.shape or any(0 in graph.shape_of(name) for name in node.inputs.values())


def _is_double(node: Node, graph: Graph) -> bool:
    """Return True if a node reads or returns float64, which no kernel computes in."""
    return node.dtype == "float64" or any(
        graph.dtype_of(name) is torch.float64 for name in node.inputs.values()
    )


def _with_fp32_scalars(node: Node, graph: Graph) -> Node:
    """Convert scalar float64 constants to fp32, where PyTorch would round them to the dtype of the other operands."""
    if node.dtype == "float64" or not node.is_floating:
        return node
    others = [name for name in node.inputs.values() if graph.shape_of(name)]
    if not any(graph.dtype_of(name).is_floating_point for name in others):
        return node
    scalars = {
        role: graph.derive_constant(f"{name}_float32", name, torch.Tensor.float)
        for role, name in node.inputs.items()
        if name in graph.constants and not graph.shape_of(name) and graph.dtype_of(name) is torch.float64
    }
    return node.with_inputs(**scalars)
