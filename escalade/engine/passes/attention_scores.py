"""Scores of attention in a training step: their factor, what is added to them, and a temperature that is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, TypeGuard

import torch

from escalade.engine.graph.graph import Graph, Node, Shape, dtype_name, product
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.attention import BIAS_ROW, AttentionBias
from escalade.engine.nodes.elementwise import Add
from escalade.engine.nodes.norms import Softmax
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.reduce import Reduce
from escalade.engine.nodes.views import Reshape
from escalade.engine.passes.batched_products import (
    is_same_matrix,
    matrix_readers,
    matrix_shape,
    operands_of,
    slope_of,
)
from escalade.engine.passes.stacks import permuted, view
from escalade.ops.expressions import Expression


class Term(NamedTuple):
    """A function of other values that is added to the scores, times a factor."""

    node: Node
    role: str
    """Input of the node that the scores are."""
    factor: float
    masked: bool
    """True if it is -inf for some scores."""


def scores_of(graph: Graph, value: str) -> tuple[Node, float, tuple[Term, ...]] | None:
    """Return the product that a softmax reads, the factor of its elements, and what is added to them."""
    node = graph.nodes.get(value)
    if node is None or graph.only_user(value) is None:
        return None
    if node.calls == "bmm":
        return node, 1.0, ()
    if Reshape.matches(node):
        x = node.inputs["x"]
        is_alike = "order" not in node.attributes and node.shape[-2:] == graph.shape_of(x)[-2:]
        return scores_of(graph, x) if is_alike else None
    if not Pointwise.matches(node) and not Add.matches(node):
        return None
    for role, name in node.inputs.items():
        if graph.shape_of(name) != node.shape or name in graph.constants:
            continue
        slope = slope_of(graph, node, role)
        before = None if slope is None or not slope.factor > 0 else scores_of(graph, name)
        if before is None or slope is None:
            continue
        product, scale, terms = before
        factor = slope.factor
        terms = tuple(one._replace(factor=one.factor * factor) for one in terms)
        if len(node.inputs) > 1:
            terms = (*terms, Term(node, role, 1.0, slope.masks))
        elif slope.has_offset:
            return None
        return product, scale * factor, terms
    return None


def add_bias(
    graph: Graph, before: Node, terms: Sequence[Term], scores: Shape, dtype: torch.dtype
) -> str | None:
    """Return what is added to scores [batch][heads][queries][keys], as an `AttentionBias`."""
    keys = scores[-1]
    assert isinstance(keys, int)
    lead = common_parts([scores[:-2], *(term.node.shape[:-2] for term in terms)])
    assert lead is not None
    total: str | None = None
    sizes: Shape = ()
    for term in terms:
        value = _term(graph, before, term)
        own = _refined(graph.shape_of(value), term.node.shape, lead)
        value = view(graph, before, value, own)
        if total is None:
            total, sizes = value, own
            continue
        sizes = torch.broadcast_shapes(sizes, own)
        inputs = {"x": total, "a": value}
        if graph.shape_of(total) != sizes:
            inputs = {"x": value, "a": total} if own == sizes else inputs
        total = graph.add(
            Pointwise.node(f"{before.name}add_bias", inputs, {"expression": "x + a"}, sizes),
            before=before.name,
        )
    if total is None:
        return None
    total = _four_dimensions(graph, before, total, lead, scores)
    items, *others, _ = graph.shape_of(total)
    if items == 1 and others == list(scores[1:3]) and graph.dtype_of(total) == dtype and keys % BIAS_ROW == 0:
        return total
    shape = (scores[0] if items != 1 else 1, *others, -(-keys // BIAS_ROW) * BIAS_ROW)
    attributes = {"masked": dtype is torch.float16 or any(term.masked for term in terms)}
    made = AttentionBias.node(f"{before.name}rows_of", {"x": total}, attributes, shape, dtype_name(dtype))
    return graph.add(made, before=before.name)


def _term(graph: Graph, before: Node, term: Term) -> str:
    """Return what a node adds to its scores."""
    expression = operator_of(term.node).expression(term.node)
    assert expression is not None
    expression = expression.substitute({term.role: Expression((), (0.0,))}).times(term.factor)
    values = {role: name for role, name in term.node.inputs.items() if role != term.role}
    if len(values) == 1:
        ((role, name),) = values.items()
        points = torch.tensor([0.0, 1.0, -3.7], dtype=torch.float64)
        is_same = graph.dtype_of(name).is_floating_point and expression.inputs == (role,)
        if is_same and torch.equal(expression.evaluate({role: points})[0], points):
            return name
    shape = torch.broadcast_shapes(*map(graph.shape_of, values.values()))
    made = Pointwise.joined(
        Node(f"{before.name}_term", Pointwise.name, {}, {}, tuple(shape), "float32"),
        expression,
        values,
        graph,
    )
    if isinstance(made, str):
        return made
    assert made is not None
    return graph.add(made, before=before.name)


def common_parts(shapes: Sequence[Shape]) -> tuple[int, ...] | None:
    """Return dimensions that those of all shapes consist of, which have as many elements; None if there are none."""
    bounds: set[int] = {1}
    for shape in shapes:
        size = 1
        for one in reversed(shape):
            size *= one  # type: ignore[operator]
            bounds.add(size)
    ordered = sorted(bounds)
    if any(after % before for before, after in pairwise(ordered)):
        return None
    return tuple(after // before for before, after in pairwise(ordered))[::-1]


def _refined(shape: Shape, scores: Shape, lead: tuple[int, ...]) -> Shape:
    """Return a broadcast shape with the leading dimensions of scores split into parts."""
    padded = (*[1] * (len(scores) - len(shape)), *shape)
    sizes, parts = [], list(lead)
    for own, whole in zip(padded[:-2], scores[:-2], strict=True):
        elements = 1
        while elements != whole:
            part = parts.pop(0)
            elements *= part
            sizes.append(part if own == whole else 1)
    return (*sizes, *padded[-2:])


def _four_dimensions(graph: Graph, before: Node, value: str, lead: tuple[int, ...], scores: Shape) -> str:
    """Merge the leading dimensions of a bias into batch items, which repeat, and heads; expand it where it must be."""
    heads = scores[1]
    shape, split, elements = list(graph.shape_of(value)), len(lead), 1
    while elements != heads:
        split -= 1
        elements *= lead[split]
    for group in (range(split), range(split, len(lead))):
        kept = [place for place in group if shape[place] != 1]
        outermost = min(kept, default=len(lead)) if group.start == 0 else group.start
        if kept:
            for place in group:
                shape[place] = lead[place] if place >= outermost else 1
    whole = tuple(shape)
    if whole != graph.shape_of(value):
        expanded = Pointwise.node(f"{before.name}add_bias", {"x": value}, {"expression": "x"}, whole)
        value = graph.add(expanded, before=before.name)
    four = (product(shape[:split]), product(shape[split : len(lead)]), *shape[-2:])
    return view(graph, before, value, four)


def scale_queries(graph: Graph, node: Node) -> None:
    """Multiply queries instead of scores by a value that is the same for all keys.

    Its own gradient, a sum of scores times their gradients, is one of queries times theirs.
    """
    found = _scaled_scores(graph, node)
    if found is None or not _feeds_softmax(graph, node.name):
        return
    product, scores, temperature = found
    readers = [one for one in graph.readers(scores) if one.name != node.name]
    gradients = [one for one in readers if _is_product(one)]
    if len(readers) > 1 or len(gradients) != len(readers):
        return
    q, turned_k = operands_of(product)
    *lead, queries, _ = node.shape
    size = matrix_shape(graph, q)[2]
    dtype = dtype_name(graph.dtype_of(q.name))
    # The gradient of the scores: that of the scaled ones, times the temperature.
    scaled_gradients = [
        one
        for one in graph.readers(temperature)
        if one.name != node.name and _is_product(one) and one.shape == node.shape
    ]
    if len(scaled_gradients) != 1 or dtype not in ("float16", "bfloat16", "float32"):
        return
    (scaled,) = scaled_gradients
    (of_scores,) = (name for name in scaled.inputs.values() if name != temperature)
    if any({*one.inputs.values()} != {scores, of_scores} for one in gradients):
        return
    sums = [graph.only_user(one.name) for one in gradients]
    last = len(node.shape) - 1
    if not all(
        Reduce.matches(one) and len(one.inputs) == 1 and last in one.attributes["dims"] for one in sums
    ):
        return
    if any(one is not None and one.attributes["kind"] != "sum" for one in sums):
        return
    products = matrix_readers(graph, scaled.name)
    if products is None or products.others or len(products.plain) != 1 or len(products.transposed) != 1:
        return
    (of_q,), (of_k,) = products.plain, products.transposed
    if (
        not is_same_matrix(graph, of_q.rows, turned_k.turned)
        or not is_same_matrix(graph, of_k.rows, q)
        or of_q.transposed
    ):
        return

    def add(expression: str, *values: str, shape: Shape, dtype: str, before: Node) -> str:
        inputs = dict(zip(("x", "a"), values, strict=False))
        made = Pointwise.node(f"{node.name}_queries", inputs, {"expression": expression}, shape, dtype)
        return graph.add(made, before=before.name)

    shape: Shape = (*lead, queries, size)
    apart = view(graph, product, q.name, shape)
    hot = add("x * a", apart, temperature, shape=shape, dtype=dtype, before=product)
    hot = view(graph, product, hot, graph.shape_of(q.name))
    graph.nodes[product.name] = replace(product, inputs=_instead(product, q.name, hot))
    graph.nodes[node.name] = Pointwise.instead_of(node, {"x": scores}, expression="x")
    graph.nodes[scaled.name] = Pointwise.instead_of(scaled, {"x": of_scores}, expression="x")
    turned = permuted(graph, of_k.node, hot, (0, 2, 1)) if of_k.rows.transposed else hot
    graph.nodes[of_k.node.name] = replace(of_k.node, inputs=_instead(of_k.node, of_k.rows.name, turned))
    # What reads the gradient of q now reads that of the scaled q, times the temperature.
    own = graph.add(replace(of_q.node, name=f"{of_q.node.name}_scaled"), before=of_q.node.name)
    split = view(graph, of_q.node, own, shape)
    cold = add("x * a", split, temperature, shape=shape, dtype=dtype, before=of_q.node)
    graph.nodes[of_q.node.name] = Reshape.instead_of(of_q.node, {"x": cold})
    for one in gradients:
        graph.nodes[one.name] = replace(
            Pointwise.instead_of(one, {"x": split, "a": apart}, expression="x * a"), shape=shape
        )


def _feeds_softmax(graph: Graph, name: str) -> bool:
    """Return True if a softmax is behind views and functions of single elements that are all that reads a value."""
    node = graph.only_user(name)
    if node is None or Softmax.matches(node):
        return node is not None
    is_followed = any(kind.matches(node) for kind in (Reshape, Pointwise, Add))
    return is_followed and _feeds_softmax(graph, node.name)


def _instead(node: Node, old: str, new: str) -> dict[str, str]:
    return {role: new if name == old else name for role, name in node.inputs.items()}


def _is_product(node: Node | None) -> TypeGuard[Node]:
    """Return True for the product of two values, element by element."""
    if not Pointwise.matches(node) or len(node.inputs) != 2:
        return False
    return operator_of(node).expression(node) in (Expression.parse("x * a"), Expression.parse("a * x"))


def _scaled_scores(graph: Graph, node: Node) -> tuple[Node, str, str] | None:
    """Return the batched product, it as the value that a node multiplies, and the factor, the same for all keys."""
    if not _is_product(node):
        return None
    for scores, factor in (tuple(node.inputs.values()), tuple(node.inputs.values())[::-1]):
        sizes, source = graph.shape_of(factor), graph.nodes.get(scores)
        if graph.shape_of(scores) != node.shape or (sizes and sizes[-1] != 1):
            continue
        if Reshape.matches(source) and source.shape[-2:] == graph.shape_of(source.inputs["x"])[-2:]:
            source = graph.nodes.get(source.inputs["x"]) if graph.only_user(source.inputs["x"]) else None
        if source is not None and source.calls == "bmm":
            return source, scores, factor
    return None
