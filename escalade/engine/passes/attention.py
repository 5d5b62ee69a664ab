"""Attention that a model writes as products and a softmax: one node, which stores no scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from escalade.engine.graph.graph import Batch, Graph, Node, Reference, Shape, fixed_shape, product
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.attention import OPERANDS, Attention, additive
from escalade.engine.nodes.base import AtenCall, activation_of
from escalade.engine.nodes.elementwise import Add
from escalade.engine.nodes.linear import Linear
from escalade.engine.nodes.norms import Softmax
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.views import Permute, Reshape
from escalade.engine.passes.views import compose_permute

_PRODUCTS = ("matmul", "bmm")
_TO_SEQUENCES = (1, 0, 2, 3)
"""Order in which `nn.MultiheadAttention` writes rows: [queries][batch][heads][size]."""
_MOST_BIASES = 2**28  # elements of a bias that a pass evaluates


def recognize_attention(graph: Graph) -> None:
    """Replace softmax(scale * q @ kᵀ [+ bias] [+ mask]) @ v by attention, if scale, bias and mask are constants.

    Windows of an image whose masks differ have a bias per window, which repeats from image to image.
    """
    for node in graph:
        if node.calls in _PRODUCTS:
            _transpose(graph, node)
    graph.remove_dead_code()
    for node in graph:
        found = _recognized(graph, node) if node.calls in _PRODUCTS else None
        if found is not None:
            graph.nodes[node.name] = found
    for node in graph:
        if Permute.matches(node):
            compose_permute(graph, node)
    for node in graph:
        if Attention.matches(node):
            for role in OPERANDS:
                _project_in_place(graph, graph.nodes[node.name], role)
            _write_sequences(graph, graph.nodes[node.name])
    graph.remove_dead_code()


def _transpose(graph: Graph, node: Node) -> None:
    """Write v @ softmax(...)ᵀ, as models of images in PyTorch's order do, as (softmax(...) @ vᵀ)ᵀ."""
    v, transposed = _factors(node)
    permute = graph.nodes.get(transposed or "")
    rank = len(node.shape)
    order = (*range(rank - 2), rank - 1, rank - 2)
    if v is None or not Permute.matches(permute) or permute.attributes["order"] != order:
        return
    weights, shape = graph.nodes.get(permute.inputs["x"]), graph.shape_of(v)
    if not Softmax.matches(weights) or len(shape) != rank or v in graph.constants:
        return

    def swapped(sizes: Shape) -> Shape:
        return tuple(sizes[dim] for dim in order)

    rows = Permute.node(f"{node.name}_values", {"x": v}, {"order": order}, swapped(shape), node.dtype)
    roles = ("self", "mat2" if node.calls == "bmm" else "other")
    inputs = dict(zip(roles, (weights.name, graph.add(rows, before=node.name)), strict=True))
    arguments = {role: Reference(role) for role in roles}
    product = replace(
        node.with_attributes(arguments=arguments), name=f"{node.name}_transposed", inputs=inputs,
        shape=swapped(node.shape),
    )  # fmt: skip
    name = graph.add(product, before=node.name)
    graph.nodes[node.name] = Permute.instead_of(node, {"x": name}, order=order)


@dataclass(frozen=True)
class _Scores:
    """Functions of the scores of a product, up to a softmax: nodes from first to last, each with its role."""

    product: Node
    steps: tuple[tuple[Node, str], ...]

    def evaluate(self, graph: Graph, batch: int, scores: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Return what the softmax reads, in float64, for a batch size and scores of this shape."""
        value = scores(fixed_shape(self.product.shape, batch), dtype=torch.float64)
        for node, role in self.steps:
            inputs = {each: graph.constants[name] for each, name in node.inputs.items() if each != role}
            wide = {
                each: one.cpu().double() if one.is_floating_point() else one.cpu()
                for each, one in inputs.items()
            }
            fixed = replace(node, shape=fixed_shape(node.shape, batch))
            value = operator_of(node).compute(fixed, {**wide, role: value})
        return value


def _recognized(graph: Graph, node: Node) -> Node | None:
    """Return attention in place of a product of a softmax and values; None for any other product."""
    weights, v = _factors(node)
    softmax = graph.nodes.get(weights or "")
    if v is None or not Softmax.matches(softmax) or softmax.attributes.get("of_channels"):
        return None
    if graph.only_user(softmax.name) is None or not activation_of(softmax).is_identity:
        return None
    scores = _scores(graph, softmax.inputs["x"])
    if scores is None or len(scores.product.shape) < 3:
        return None
    q, transposed = _factors(scores.product)
    with torch.device(
        "cpu"
    ):  # where `_Scores.evaluate` has its constants; that of new constants is the graph's
        found = _scale_and_bias(graph, scores)
    if q is None or transposed is None or found is None:
        return None
    scale, bias = found
    rank = len(scores.product.shape)
    if any(len(graph.shape_of(one)) != rank for one in (q, transposed, v)):
        return None
    order: tuple[int, ...] = (*range(rank - 2), rank - 1, rank - 2)
    permute = graph.nodes.get(transposed)
    if Permute.matches(permute):
        transposed, order = permute.inputs["x"], tuple(permute.attributes["order"][dim] for dim in order)
    q, first = _unscaled(graph, q)
    keys, second = _unscaled(graph, transposed)
    if {q, keys, v} & graph.constants.keys() or not scale * first * second:
        return None
    shape = tuple(graph.shape_of(keys)[dim] for dim in order)
    k = graph.add(
        Permute.node(f"{node.name}_keys", {"x": keys}, {"order": order}, shape, node.dtype), node.name
    )
    name = None if bias is None else graph.add_constant(f"{node.name}_bias", bias.float())
    before = set(graph.nodes)
    made = Attention.of(node, q, k, v, name, scale * first * second, graph, causal=False)
    for added in [graph.nodes[other] for other in graph.nodes if other not in before]:
        del graph.nodes[added.name]
        graph.insert_before(node.name, added)
    return made


def _factors(node: Node) -> tuple[str | None, str | None]:
    if node.calls not in _PRODUCTS:
        return None, None
    call = AtenCall(node)
    return call.value("self"), call.value("other") or call.value("mat2")


def _scores(graph: Graph, value: str) -> _Scores | None:
    """Return the product that a value is a function of, through nodes that read only constants besides."""
    steps: list[tuple[Node, str]] = []
    while (node := graph.nodes.get(value)) is not None and graph.only_user(value) is not None:
        if node.calls in _PRODUCTS:
            return _Scores(node, tuple(reversed(steps)))
        roles = [role for role, name in node.inputs.items() if name not in graph.constants]
        if len(roles) != 1 or not any(kind.matches(node) for kind in (Add, Pointwise, Reshape)):
            return None
        steps.append((node, roles[0]))
        value = node.inputs[roles[0]]
    return None


def _scale_and_bias(graph: Graph, scores: _Scores) -> tuple[float, torch.Tensor | None] | None:
    """Return scale and bias (in the node's form) if the function of the scores is affine; None for any other."""
    if not scores.steps:
        return 1.0, None
    shape = scores.product.shape
    lead, size = shape[0], fixed_shape(shape, 2)
    if torch.Size(size).numel() > _MOST_BIASES or not all(isinstance(one, int) for one in shape[1:]):
        return None
    bias = scores.evaluate(graph, 1, torch.zeros)
    if bias.isnan().any() or (bias == torch.inf).any() or (bias == -torch.inf).all(-1).any():
        return None  # without any key, softmax is NaN
    if bias.numel() != torch.Size(fixed_shape(shape, 1)).numel():
        return None  # the scores are broadcast
    finite = bias.isfinite()
    slopes = (scores.evaluate(graph, 1, torch.ones) - bias)[finite]
    # Kernels take it in fp32. Further digits would vary with the bias, and new weights need the same graph.
    scale = float(slopes.median().float())
    for batch in (1, 2) if isinstance(lead, Batch) else (1,):  # at other sizes the bias repeats
        drawn = torch.randn(
            fixed_shape(shape, batch), dtype=torch.float64, generator=torch.Generator().manual_seed(0)
        )
        result = scores.evaluate(graph, batch, lambda *_, drawn=drawn, **__: 10 * drawn)
        expected = (10 * scale * drawn).reshape(batch, *bias.shape) + bias
        if not torch.allclose(result.reshape(expected.shape), expected, rtol=1e-5, atol=1e-5):
            return None
    if not bias.any():
        return scale, None
    bias = bias.unsqueeze(1) if bias.dim() == 3 else bias.flatten(0, -4)
    for dim in (1, 2):
        if torch.equal(bias, bias.narrow(dim, 0, 1).expand_as(bias)):
            bias = bias.narrow(dim, 0, 1)
    items = len(bias)
    period = next(n for n in range(1, items + 1) if items % n == 0 and torch.equal(bias[n:], bias[:-n]))
    return scale, additive(bias[:period]).to(graph.device)


def _unscaled(graph: Graph, value: str) -> tuple[str, float]:
    """Return operand and factor of a value that is a multiple of another; else the value itself and 1."""
    node = graph.nodes.get(value)
    if Permute.matches(node):
        source, factor = _unscaled(graph, node.inputs["x"])
        if factor == 1:
            return value, 1.0
        unscaled = replace(node.with_inputs(x=source), name=f"{value}_unscaled")
        return graph.add(unscaled, before=value), factor
    if not Pointwise.matches(node) or len(node.inputs) != 1:
        return value, 1.0
    ((role, operand),) = node.inputs.items()
    points = torch.tensor([0.0, 1.0, -3.0, 0.37], dtype=torch.float64)
    expression = operator_of(node).expression(node)
    assert expression is not None
    results = expression.evaluate({role: points})
    if len(results) != 1 or graph.dtype_of(operand) != getattr(torch, node.dtype):
        return value, 1.0
    factor = float(results[0][1])
    return (operand, factor) if torch.allclose(results[0], factor * points, rtol=1e-6) else (value, 1.0)


# `nn.MultiheadAttention` computes on rows [tokens][batch][features], whatever the order of its operands.


def _project_in_place(graph: Graph, node: Node, role: str) -> None:
    """Move the permutation to sequences behind the projection of an operand, where it is only a view."""
    value = _split_before_permute(graph, node, role)
    while (before := graph.nodes.get(value)) is not None and not Linear.matches(before):
        if len(before.inputs) != 1 or not operator_of(before).may_alias(before):
            return
        (value,) = before.inputs.values()
    permute = None if before is None else graph.nodes.get(before.inputs["x"])
    if before is None or not Permute.matches(permute) or permute.attributes["order"] != _TO_SEQUENCES[:3]:
        return
    shape = (before.shape[1], before.shape[0], before.shape[2])
    rows = replace(before.with_inputs(x=permute.inputs["x"]), name=f"{before.name}_rows", shape=shape)
    name = graph.add(rows, before=before.name)
    graph.nodes[before.name] = Permute.instead_of(before, {"x": name}, order=_TO_SEQUENCES[:3])


def _split_before_permute(graph: Graph, node: Node, role: str) -> str:
    """Move a reshape that splits one dimension in front of a permutation; merged dimensions would not be a view.

    Return the operand.
    """
    split = graph.nodes.get(node.inputs[role])
    permute = graph.nodes.get(split.inputs["x"]) if Reshape.matches(split) else None
    merged = graph.nodes.get(permute.inputs["x"]) if Permute.matches(permute) else None
    if split is None or permute is None or not Reshape.matches(merged):
        return node.inputs[role]
    narrow, wide, order = permute.shape, split.shape, permute.attributes["order"]
    at = next((dim for dim, (one, other) in enumerate(zip(narrow, wide, strict=False)) if one != other), 0)
    if len(wide) != len(narrow) + 1 or narrow[at + 1 :] != wide[at + 2 :]:
        return node.inputs[role]
    axis = order[at]
    shape = (*merged.shape[:axis], *wide[at : at + 2], *merged.shape[axis + 1 :])
    apart = [(axis, axis + 1) if dim == axis else (dim + (dim > axis),) for dim in order]
    view = Reshape.node(f"{split.name}_apart", {"x": merged.inputs["x"]}, {}, shape, split.dtype)
    attributes = {"order": tuple(dim for dims in apart for dim in dims)}
    name = graph.add(view, before=node.name)
    name = graph.add(
        Permute.node(f"{split.name}_heads", {"x": name}, attributes, wide, split.dtype), before=node.name
    )
    graph.nodes[node.name] = graph.nodes[node.name].with_inputs(**{role: name})
    return name


def _write_sequences(graph: Graph, node: Node) -> None:
    """Let attention write the order that its only reader permutes its result to.

    If a layer follows whose result is permuted back, both permutations disappear.
    """
    permute = graph.only_user(node.name)
    if (
        not Permute.matches(permute)
        or permute.attributes["order"] != _TO_SEQUENCES
        or node.attributes["order"] != "bqh"
    ):
        return
    chain = [permute]
    for kind in (Reshape, Linear, Reshape, Permute):
        reader = graph.only_user(chain[-1].name)
        if not kind.matches(reader):
            break
        chain.append(reader)
    else:
        _, rows, layer, _, back = chain
        if back.attributes["order"] == _TO_SEQUENCES[:3] and rows.shape[-1] == product(node.shape[2:]):
            shape = (*node.shape[:2], rows.shape[-1])
            name = graph.add(replace(rows.with_inputs(x=node.name), shape=shape), before=back.name)
            graph.nodes[back.name] = replace(layer.with_inputs(x=name), name=back.name, shape=back.shape)
            return
    graph.nodes[node.name] = replace(node, shape=permute.shape).with_attributes(order="qbh")
    graph.remove(permute, instead=node.name)
