"""Training steps: attention that a model writes as products and a softmax, and its gradients, as two fused calls.

The joint graph has the products, the softmax between them and autograd's gradients of all three. Where nothing else
reads the scores or the weights, one call computes the result and another one all gradients, and neither is stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from escalade.engine.graph.graph import Graph, Node, Shape, dtype_name
from escalade.engine.nodes.attention import (
    LSE_STEP,
    AttentionBackward,
    AttentionForward,
)
from escalade.engine.nodes.base import Operator, activation_of
from escalade.engine.nodes.norms import Softmax, SoftmaxBackward
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.reduce import Reduce
from escalade.engine.nodes.views import Permute, Reshape
from escalade.engine.passes.attention_scores import Term, add_bias, common_parts, scale_queries, scores_of
from escalade.engine.passes.batched_products import (
    Matrix,
    Product,
    is_same_matrix,
    matrix_readers,
    matrix_shape,
    multiple_of,
    operands_of,
    replace_product,
    rows_of,
    source_product,
    unmerged,
)
from escalade.engine.passes.gradient_patterns import sort_nodes
from escalade.engine.passes.stacks import view
from escalade.ops.base.card import Card

_MOST_SIZE = {"flash": 256, "efficient": 128}
"""Largest heads: beyond, PyTorch's kernels keep their sums in memory or do not exist."""
_SCORE_PASSES = 13
"""Reads and writes of all scores by separate steps: two products, the softmax, its gradient, and four products."""
_TILE = 64  # queries and keys per tile of PyTorch's kernels, which compute whole tiles
_RATE = {"flash": 0.5, "efficient": 0.2}
"""Share of the rate of mma.sync that forward and backward kernels reach together; assumed, not measured."""
_PRODUCT_RATE = 0.5
"""The same of batched products of few rows, where the bytes do not hide them."""


def recognize_step_attention(graph: Graph, card: Card) -> None:
    """Replace softmax(scale * q @ kᵀ [+ bias] [+ mask]) @ v and its gradients by PyTorch's fused attention."""
    for node in graph:
        if Pointwise.matches(node) and len(node.inputs) == 2:
            scale_queries(graph, node)
    sort_nodes(graph)
    for node in graph:
        if SoftmaxBackward.matches(node) and not node.attributes["log"]:
            found = _Attention.of(graph, node)
            if found is not None and found.is_faster(graph, card):
                found.without_multiples(graph).fuse(graph)
    sort_nodes(graph)
    graph.remove_dead_code()


@dataclass(frozen=True)
class _Attention:
    """Nodes that compute attention and its gradients."""

    softmax: Node
    gradient: Node
    """Gradient of the softmax."""
    q: Matrix
    k: Matrix
    v: Matrix
    of_y: Matrix
    """Gradient of the result."""
    scale: float
    terms: tuple[Term, ...]
    y: Product
    of_q: tuple[Product, ...]
    of_k: tuple[Product, ...]
    of_v: tuple[Product, ...]
    of_bias: bool
    """True if anything reads the gradient of the scores besides the gradients of q and k."""
    sums: tuple[tuple[Node, float], ...]
    """All that reads it, if these are sums over the batch of its multiples."""
    sizes: tuple[int, int, int, int, int]
    """Matrices, queries, keys, elements per head of q and k, and of v."""

    @classmethod
    def of(cls, graph: Graph, gradient: Node) -> _Attention | None:
        """Return the attention of which a node is the gradient of the softmax; None if it is anything else."""
        softmax = graph.nodes.get(gradient.inputs["softmax"])
        if not Softmax.matches(softmax) or softmax.attributes["of_channels"]:
            return None
        if not activation_of(softmax).is_identity or gradient.attributes["of_channels"]:
            return None
        scores = scores_of(graph, softmax.inputs["x"])
        weights = matrix_readers(graph, softmax.name)
        if scores is None or weights is None or {one.name for one, _ in weights.others} != {gradient.name}:
            return None
        product, scale, terms = scores
        # Weights @ v is the result, and weightsᵀ @ its gradient that of v.
        if len(weights.plain) != 1 or len(weights.transposed) > 1 or not scale > 0:
            return None
        (y,) = weights.plain
        of_v = tuple(weights.transposed)
        source = source_product(graph, gradient.inputs["gradient"])
        if source is None or (of_v and not is_same_matrix(graph, of_v[0].rows, source[0])):
            return None
        of_y, turned_v = source
        if not is_same_matrix(graph, turned_v.turned, y.rows):
            return None
        q, turned_k = operands_of(product)
        k = turned_k.turned
        readers = matrix_readers(graph, gradient.name, linear=True)
        if readers is None:
            return None
        of_q = tuple(
            one for one in readers.plain if one.is_multiple(scale) and is_same_matrix(graph, one.rows, k)
        )
        of_k = tuple(
            one for one in readers.transposed if one.is_multiple(scale) and is_same_matrix(graph, one.rows, q)
        )
        if not (of_q or of_k):
            return None
        products = len(readers.plain) + len(readers.transposed)
        of_bias = bool(readers.others) or len(of_q) + len(of_k) < products
        sums = tuple(one for one in readers.others if _is_batch_sum(graph, one[0]))
        sums = sums if len(sums) == len(readers.others) + products - len(of_q) - len(of_k) else ()
        (matrices, queries, keys), size = product.shape, matrix_shape(graph, q)[2]
        sizes = matrices, queries, keys, size, matrix_shape(graph, y.rows)[2]
        types = {graph.dtype_of(one.name) for one in (q, k, y.rows, of_y)}
        if len(types) > 1 or not product.is_floating or types == {torch.float64}:
            return None
        of_y = of_v[0].rows if of_v else of_y
        made = cls(
            softmax, gradient, q, k, y.rows, of_y, scale, terms, y, of_q, of_k, of_v, of_bias, sums,
            sizes,  # type: ignore[arg-type]
        )  # fmt: skip
        shapes = [made._lead(graph), *(term.node.shape[:-2] for term in terms)]
        return None if common_parts(shapes) is None else made

    def kernel(self, graph: Graph) -> str:
        is_narrow = graph.dtype_of(self.q.name).itemsize == 2
        *_, size, value_size = self.sizes
        is_flash = is_narrow and not self.terms and not self.of_bias and size == value_size
        return "flash" if is_flash else "efficient"

    def is_faster(self, graph: Graph, card: Card) -> bool:
        """Compare estimates: bytes of scores that separate steps read and write, and tiles of the fused kernels."""
        matrices, queries, keys, size, value_size = self.sizes
        kernel, itemsize = self.kernel(graph), graph.dtype_of(self.q.name).itemsize
        if max(size, value_size) > _MOST_SIZE[kernel]:
            return False
        scores, mma = matrices * queries * keys, card.tensor_core_rate("fp16")
        steps = 8 + 2 * len(self.terms)
        stored = itemsize * (_SCORE_PASSES + 2 * len(self.terms) - 3 * self.of_bias)
        apart = steps * card.rates.launch_us + card.transfer_us(scores * stored)
        apart += 2 * scores * 3 * (size + value_size) / (_PRODUCT_RATE * mma)
        tiles = matrices * -(-queries // _TILE) * -(-keys // _TILE)
        flops = 2 * tiles * _TILE**2 * (4 * size + 3 * value_size)
        rate = _RATE[kernel] * mma * (1 if itemsize == 2 else 0.2)
        return flops / rate + (3 + self.of_bias) * card.rates.launch_us < apart

    def without_multiples(self, graph: Graph) -> _Attention:
        """Return the attention of operands that the model has not yet multiplied by a number, and drop the gradients of
        these products.
        """
        made = self
        for role, products in (("q", self.of_q), ("k", self.of_k)):
            operand: Matrix = getattr(made, role)
            source = _unscaled(graph, operand.name)
            gradients = [_scaled_gradient(graph, one.node.name) for one in products]
            if source is None or any(one is None or one[1] != source[1] for one in gradients):
                continue
            for gradient in gradients:
                assert gradient is not None
                graph.remove(gradient[0], instead=gradient[0].inputs["x"])
            unscaled = operand._replace(name=source[0])
            made = replace(made, q=unscaled) if role == "q" else replace(made, k=unscaled)
            made = replace(made, scale=made.scale * source[1])
        return made

    def fuse(self, graph: Graph) -> None:
        _, queries, keys, size, value_size = self.sizes
        lead, first, of_bias = self._lead(graph), self.y.node, self._summed(graph)
        q, k, v = (rows_of(graph, first, one, lead) for one in (self.q, self.k, self.v))
        bias = add_bias(graph, first, self.terms, (*lead, queries, keys), graph.dtype_of(q))
        inputs = {"q": q, "k": k, "v": v, **({} if bias is None else {"bias": bias})}
        call, kernel, dtype = (
            graph.fresh(f"{self.softmax.name}_attention"),
            self.kernel(graph),
            graph.dtype_of(q),
        )
        attributes = {"scale": self.scale, "kernel": kernel, "of_bias": of_bias}

        def result(
            kind: type[Operator],
            read: Mapping[str, str],
            before: Node,
            number: int,
            shape: Shape,
            dtype: torch.dtype,
        ) -> str:
            own = {**attributes, "result": number, "call": f"{call}_{kind.name}"}
            name = f"{call}_{kind.name.removeprefix('attention_')}"
            return graph.add(kind.node(name, read, own, shape, dtype_name(dtype)), before=before.name)

        y = result(AttentionForward, inputs, first, 0, (*lead, queries, value_size), dtype)
        rows = queries if kernel == "flash" else -(-queries // LSE_STEP) * LSE_STEP
        sums = result(AttentionForward, inputs, first, 1, (*lead, rows), torch.float32)
        replace_product(graph, self.y, y)
        before = _first(graph, [one.node for one in (*self.of_v, *self.of_q, *self.of_k)])
        of_y = rows_of(graph, before, self.of_y, lead)
        read = {"gradient": of_y, "y": y, "logsumexp": sums, **inputs}
        shapes = (self.of_q, queries, size), (self.of_k, keys, size), (self.of_v, keys, value_size)
        for number, (products, *shape) in enumerate(shapes):
            if products:
                found = result(AttentionBackward, read, before, number, (*lead, *shape), dtype)
                for one in products:
                    replace_product(graph, one, found)
        if of_bias == "full":
            found = result(AttentionBackward, read, before, 3, (*lead, queries, keys), dtype)
            found = view(graph, before, found, self.gradient.shape)
            graph.nodes[self.gradient.name] = Pointwise.instead_of(
                self.gradient, {"x": found}, expression="x"
            )
        elif of_bias:
            found = result(AttentionBackward, read, before, 3, (1, lead[1], queries, keys), torch.float32)
            for node, factor in self.sums:
                same = view(graph, before, found, node.shape)
                times = "x" if factor == 1 else f"x * {factor!r}"
                graph.nodes[node.name] = Pointwise.instead_of(node, {"x": same}, expression=times)

    def _summed(self, graph: Graph) -> str:
        """Return in which form the gradient of the bias is needed: `AttentionBackward.of_bias`."""
        if not self.of_bias:
            return ""
        batch, heads = self._lead(graph)
        is_summed = bool(self.sums) and all(
            graph.shape_of(node.inputs["x"])[-3] == heads
            and math.prod(graph.shape_of(node.inputs["x"])[:-3]) == batch  # type: ignore[arg-type]
            for node, _ in self.sums
        )
        return "summed" if is_summed else "full"

    def _lead(self, graph: Graph) -> tuple[int, int]:
        """Return batch and heads, in which all operands are views if the model has them in this shape."""
        leads = {tuple(graph.shape_of(unmerged(graph, one.name))[:-2]) for one in self._operands}
        lead = leads.pop() if len(leads) == 1 else ()
        return lead if len(lead) == 2 else (self.sizes[0], 1)  # type: ignore[return-value]

    @property
    def _operands(self) -> tuple[Matrix, ...]:
        return self.q, self.k, self.v, self.of_y


def _is_batch_sum(graph: Graph, node: Node) -> bool:
    """Return True for a sum in fp32 of matrices over all leading dimensions but the last, the heads."""
    if not Reduce.matches(node) or node.attributes["kind"] != "sum" or node.dtype != "float32":
        return False
    rank = len(graph.shape_of(node.inputs["x"]))
    return len(node.inputs) == 1 and rank > 3 and tuple(node.attributes["dims"]) == tuple(range(rank - 3))


def _first(graph: Graph, nodes: Sequence[Node]) -> Node:
    names = {node.name for node in nodes}
    return next(node for node in graph if node.name in names)


def _unscaled(graph: Graph, name: str) -> tuple[str, float] | None:
    """Return the value of which an operand is a multiple, in the operand's shape, and the factor."""
    node = graph.nodes.get(name)
    factor = multiple_of(graph, node)
    if node is not None and factor is not None:
        (source,) = node.inputs.values()
        return source, factor
    if not Permute.matches(node) and not (Reshape.matches(node) and "order" not in node.attributes):
        return None
    before = _unscaled(graph, node.inputs["x"])
    if before is None:
        return None
    return graph.add(node.with_inputs(x=before[0]), before=node.name), before[1]


def _scaled_gradient(graph: Graph, name: str) -> tuple[Node, float] | None:
    """Return the multiple of a product that is all that is read of it, behind views, and its factor."""
    node = graph.only_user(name)
    factor = multiple_of(graph, node)
    if node is not None and factor is not None:
        return node, factor
    is_view = Permute.matches(node) or (Reshape.matches(node) and "order" not in node.attributes)
    return _scaled_gradient(graph, node.name) if node is not None and is_view else None
