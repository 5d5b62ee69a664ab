"""Attention that a model writes as products and a softmax: one node, which stores no scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from escalade.engine.graph.graph import Batch, Graph, Node, fixed_shape
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.attention import Attention, additive
from escalade.engine.nodes.base import AtenCall, activation_of
from escalade.engine.nodes.elementwise import Add
from escalade.engine.nodes.norms import Softmax
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.views import Permute, Reshape

_PRODUCTS = ("matmul", "bmm")
_TO_SEQUENCES = (1, 0, 2, 3)
"""Order in which `nn.MultiheadAttention` writes rows: [queries][batch][heads][size]."""
_MOST_BIASES = 2**28  # elements of a bias that a pass evaluates


def recognize_attention(graph: Graph) -> None:
    """Replace softmax(scale * q @ kᵀ [+ bias] [+ mask]) @ v by attention, if scale, bias and mask are constants.

    Windows of an image whose masks differ have a bias per window, which repeats from image to image.
    """
    for node in graph:
        found = _recognized(graph, node) if node.calls in _PRODUCTS else None
        if found is not None:
            graph.nodes[node.name] = found
    for node in graph:
        if Attention.matches(node):
            _write_sequences(graph, node)
    graph.remove_dead_code()


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
            wide = {each: one.cpu().double() if one.is_floating_point() else one.cpu() for each, one in inputs.items()}
            fixed = replace(node, shape=fixed_shape(node.shape, batch))
            value = operator_of(node).compute(fixed, {**wide, role: value})
        return value


def _recognized(graph: Graph, product: Node) -> Node | None:
    """Return attention in place of a product of a softmax and values; None for any other product."""
    weights, v = _factors(product)
    softmax = graph.nodes.get(weights or "")
    if v is None or not Softmax.matches(softmax) or softmax.attributes.get("of_channels"):
        return None
    if graph.only_user(softmax.name) is None or not activation_of(softmax).is_identity:
        return None
    scores = _scores(graph, softmax.inputs["x"])
    if scores is None or len(scores.product.shape) < 3:
        return None
    q, transposed = _factors(scores.product)
    found = _scale_and_bias(graph, scores)
    if q is None or transposed is None or found is None:
        return None
    scale, bias = found
    q, first = _unscaled(graph, q)
    transposed, second = _unscaled(graph, transposed)
    if {q, transposed, v} & graph.constants.keys() or not scale * first * second:
        return None
    shape, rank = graph.shape_of(transposed), len(scores.product.shape)
    if len(shape) != rank or len(graph.shape_of(q)) != rank or len(graph.shape_of(v)) != rank:
        return None
    order = (*range(rank - 2), rank - 1, rank - 2)
    flipped = Permute.node(f"{product.name}_keys", {"x": transposed}, {"order": order}, tuple(shape[dim] for dim in order), product.dtype)
    k = graph.add(flipped, before=product.name)
    name = None if bias is None else graph.add_constant(f"{product.name}_bias", bias.float())
    before = set(graph.nodes)
    made = Attention.of(product, q, k, v, name, scale * first * second, graph, causal=False)
    for added in [graph.nodes[other] for other in graph.nodes if other not in before]:
        del graph.nodes[added.name]
        graph.insert_before(product.name, added)
    return made


def _factors(product: Node) -> tuple[str | None, str | None]:
    if product.calls not in _PRODUCTS:
        return None, None
    call = AtenCall(product)
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
    """Return scale and bias, as a node has it, if that is the function of the scores; None for any other function."""
    if not scores.steps:
        return 1.0, None
    shape = scores.product.shape
    lead, size = shape[0], fixed_shape(shape, 2)
    if torch.Size(size).numel() > _MOST_BIASES or not all(isinstance(one, int) for one in shape[1:]):
        return None
    bias = scores.evaluate(graph, 1, torch.zeros)
    if bias.isnan().any() or (bias == torch.inf).any() or (bias == -torch.inf).all(-1).any():
        return None  # without any key, softmax is NaN
    finite = bias.isfinite()
    slopes = (scores.evaluate(graph, 1, torch.ones) - bias)[finite]
    scale = float(slopes.median())
    for batch in (1, 2) if isinstance(lead, Batch) else (1,):  # at other sizes the bias repeats
        drawn = torch.randn(fixed_shape(shape, batch), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
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
    """Return the operand and the factor of a value that is a multiple of one; else the value and 1."""
    node = graph.nodes.get(value)
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


def _write_sequences(graph: Graph, node: Node) -> None:
    """Let attention write the order of dimensions that its only reader permutes its result to."""
    reader = graph.only_user(node.name)
    if not Permute.matches(reader) or reader.attributes["order"] != _TO_SEQUENCES or node.attributes["order"] != "bqh":
        return
    graph.nodes[node.name] = replace(node, shape=reader.shape).with_attributes(order="qbh")
    graph.remove(reader, instead=node.name)
