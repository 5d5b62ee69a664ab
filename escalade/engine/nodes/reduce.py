"""Reductions over any dimensions: sums, means, extrema, variances, norms, log-sum-exp."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from escalade.engine.graph.aten import resolve_operator
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.base import (
    AtenCall,
    Layouts,
    Match,
    Operator,
    Tensors,
    activate,
    activation_of,
    match_aten,
)
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.pointwise import Pointwise, broadcast
from escalade.engine.nodes.signature import (
    ANY,
    EPSILON,
    FLAG,
    Attribute,
    Signature,
    Sizes,
    is_whole,
    one_of,
)
from escalade.engine.nodes.views import Permute, Reshape
from escalade.ops.expressions import IDENTITY, Expression
from escalade.ops.reduce import REDUCE, ReduceProblem

_NHWC_ORDER = (0, 2, 3, 1)
MAX_DIM = 15


@dataclass(frozen=True)
class _Kind:
    """A reduction: with PyTorch, and as a kind of our operation between two expressions."""

    compute: Callable[..., torch.Tensor]
    kind: str
    before: str = "x"
    after: str = "x"


def _norm(order: float) -> Callable[..., torch.Tensor]:
    return lambda x, dims, keepdim: torch.linalg.vector_norm(x, order, dims, keepdim)


_KINDS: Mapping[str, _Kind] = {
    "sum": _Kind(torch.sum, "sum"),
    "mean": _Kind(torch.mean, "mean"),
    "amax": _Kind(torch.amax, "max"),
    "amin": _Kind(torch.amin, "min"),
    "var": _Kind(torch.var, "var"),
    "std": _Kind(torch.std, "var", after="sqrt(x)"),
    "logsumexp": _Kind(torch.logsumexp, "logsumexp"),
    "norm1": _Kind(_norm(1.0), "sum", "abs(x)"),
    "norm2": _Kind(_norm(2.0), "sum", "x * x", "sqrt(x)"),
    "norm_inf": _Kind(_norm(math.inf), "max", "abs(x)"),
}
_INDEX_KINDS = {"argmax": torch.argmax, "argmin": torch.argmin}
_NORMS = {1.0: "norm1", 2.0: "norm2", math.inf: "norm_inf"}
_LOSS_REDUCTIONS = {1: "mean", 2: "sum"}
"""Reductions of losses, by PyTorch's numbers."""
_OTHER_NAMES = {"max": "amax", "min": "amin", "special_logsumexp": "logsumexp"}
"""Kinds of PyTorch operators with other names; of `max` and `min` with a dimension, the first result."""
_SEVERAL = {"var_mean": ("var", "mean"), "std_mean": ("std", "mean"), "aminmax": ("amin", "amax")}
"""Kinds of each result of PyTorch operators with two."""


def _are_dims(value: Any) -> bool:
    is_tuple = type(value) is tuple and all(is_whole(dim, most=MAX_DIM) for dim in value)
    return is_tuple and list(value) == sorted(set(value))


_IMAGE_RANK = 4


class Reduce(Operator):
    """y = kind of x over `dims`, with an expression `before` of each element and an activation of each result."""

    name = "reduce"
    signature = Signature(
        {"x": ANY},
        {
            "kind": one_of(*_KINDS),
            "dims": Attribute("dimensions in order, each once", _are_dims),
            "keepdim": FLAG,
            "correction": EPSILON,
            "relu": FLAG,
        },
    )
    takes_expressions = True

    def match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        """Match a reduction by name; a mean over an image has matched as a pool before."""
        name, x = node.calls, call.value("self")
        if _is_loss(node) and x is not None and not node.shape:
            return self._match_loss(node, call, graph)
        result = node.attributes.get("result", 0)
        kind = _SEVERAL[name][result] if name in _SEVERAL else _OTHER_NAMES.get(name, name)
        if name == "linalg_vector_norm":
            kind = _NORMS.get(float(call("ord", 2)), "")
        if kind not in _KINDS or x is None or not self._is_supported(node, call, x, graph):
            return None
        rank = len(graph.shape_of(x))
        dim = call("dim", ())
        wanted = (dim,) if isinstance(dim, int) else tuple(dim)
        dims = tuple(sorted({one % rank for one in wanted})) if wanted and rank else tuple(range(rank))
        correction = call("correction", int(call("unbiased", True))) if kind in ("var", "std") else 0
        if correction < 0:
            return None
        known = self.instead_of(
            node, {"x": x}, kind=kind, dims=dims, keepdim=bool(call("keepdim", False)), correction=correction,
            relu=False,
        )  # fmt: skip
        if graph.typed:  # sizes are fixed; images are mostly in NHWC, but layouts are assigned later
            may_fit = rank <= _IMAGE_RANK or _split_sizes((2,) * rank, tuple(range(rank)), known) is not None
        else:
            may_fit = are_adjacent(known, rank)
        return known if may_fit else self._match_nonadjacent(known, graph)

    def _match_nonadjacent(self, node: Node, graph: Graph) -> Node:
        """Return a reduction of dimensions that are not adjacent in memory: they are moved behind the others first."""
        x, dims = node.inputs["x"], node.attributes["dims"]
        shape = graph.shape_of(x)
        kept = tuple(dim for dim in range(len(shape)) if dim not in dims)
        sizes = tuple(shape[dim] for dim in (*kept, *dims))
        order = {"order": (*kept, *dims)}
        moved = graph.add(Permute.node(f"{node.name}_moved", {"x": x}, order, sizes, node.dtype))
        inner = tuple(range(len(kept), len(shape)))
        reduced = node.with_inputs(x=moved).with_attributes(dims=inner, keepdim=False)
        if not node.attributes["keepdim"]:
            return reduced
        reduced = replace(reduced, name=f"{node.name}_reduced", shape=sizes[: len(kept)])
        return Reshape.instead_of(node, {"x": graph.add(reduced)})

    def _match_loss(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        """Match the mean or sum of a pointwise loss."""
        kind = _LOSS_REDUCTIONS.get(call("reduction", 1))
        shape = broadcast(map(graph.shape_of, node.inputs.values()))
        if kind is None or shape is None:
            return None
        arguments = {**node.attributes["arguments"], "reduction": 0}
        each = replace(node, name=graph.fresh(f"{node.name}_terms"), shape=shape)
        each = each.with_attributes(arguments=arguments)
        terms = Pointwise().match(each, AtenCall(each), graph)
        if not isinstance(terms, Node):
            return None
        graph.append(terms)
        return self.instead_of(
            node, {"x": terms.name}, kind=kind, dims=tuple(range(len(shape))), keepdim=False, correction=0,
            relu=False,
        )  # fmt: skip

    @staticmethod
    def _is_supported(node: Node, call: AtenCall, x: str, graph: Graph) -> bool:
        """Return True for floating operands that are reduced in their own dtype, without indices."""
        return (
            node.is_floating
            and graph.dtype_of(x) == getattr(torch, node.dtype)
            and not call.converts(x, graph)
            and call.value("other") is None
            and (node.attributes.get("result", 0) == 0 or node.calls in _SEVERAL)
        )

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        (x,) = prologue_of(node).evaluate({"x": inputs["x"]})
        options = {"correction": a["correction"]} if a["kind"] in ("var", "std") else {}
        reduce = _KINDS[a["kind"]].compute
        if not a["dims"]:  # PyTorch takes an empty tuple as all dimensions; x is a scalar
            return activate(node, reduce(x.reshape(1), (0,), keepdim=False, **options))
        return activate(node, reduce(x, a["dims"], keepdim=a["keepdim"], **options))

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        """Return any layout in which the reduced dimensions are adjacent, and the others in the result's order."""
        layout, kept = given.get("x", "nchw"), node.attributes["keepdim"]
        if "x" not in given or _fits_layout(node, layout):
            return Layouts(None, layout if kept else "nchw")
        is_batched = 0 not in node.attributes["dims"]  # else PyTorch reduces an NCHW image as it is
        other = "nhwc" if layout == "nchw" and is_batched and _fits_layout(node, "nhwc") else "nchw"
        return Layouts(other, other if kept else "nchw")

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        form = forms.value(node.inputs["x"])
        order = _NHWC_ORDER if form.layout == "nhwc" else tuple(range(len(form.shape)))
        sizes = _split_sizes(form.shape, order, node)
        if sizes is None or 0 in form.shape:
            return None
        kind = _KINDS[node.attributes["kind"]]
        before = Expression.parse(kind.before).substitute({"x": prologue_of(node)})
        after = activation_of(node).substitute({"x": Expression.parse(kind.after)})
        problem = ReduceProblem(
            kind.kind, *sizes, float(node.attributes["correction"]), before.text, activation=after.text,
            dtype=forms.stored,
        )  # fmt: skip
        return Lowered(REDUCE, problem)


class ArgReduce(Operator):
    """y = index of the largest or smallest element of x along one dimension, or in flattened x, as int64."""

    name = "arg_reduce"
    signature = Signature(
        {"x": ANY},
        {
            "kind": one_of(*_INDEX_KINDS),
            "dims": Attribute(
                "one dimension, or all in order", lambda value: bool(value) and _are_dims(value)
            ),
            "keepdim": FLAG,
        },
        indices=True,
    )

    @match_aten("argmax", "argmin", "max", "min")
    def match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        """Match argmax and argmin, and the indices of max and min along a dimension."""
        x, name = call.value("self"), node.calls.removeprefix("arg")
        if x is None or node.dtype != "int64" or node.attributes.get("result", 1) != 1 or graph.typed:
            return None
        rank = len(graph.shape_of(x))
        if not rank or not graph.dtype_of(x).is_floating_point or call.value("other") is not None:
            return None
        dim = call("dim")
        dims = tuple(range(rank)) if dim is None else (dim % rank,)
        keepdim = bool(call("keepdim", False))
        return self.instead_of(node, {"x": x}, kind=f"arg{name}", dims=dims, keepdim=keepdim)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        x, dims = inputs["x"], node.attributes["dims"]
        reduce = _INDEX_KINDS[node.attributes["kind"]]
        if len(dims) == x.dim():
            return reduce(x).reshape([1] * x.dim() if node.attributes["keepdim"] else [])
        (dim,) = dims
        return reduce(x, dim, node.attributes["keepdim"])

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        """Read an NHWC image only over its channels: indices are in PyTorch's order."""
        is_read = given.get("x") == "nhwc" and node.attributes["dims"] == (1,)
        return Layouts("nhwc" if is_read else "nchw", "nchw")

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        form = forms.value(node.inputs["x"])
        dims = node.attributes["dims"]
        if 0 in form.shape or (form.layout == "nhwc" and dims != (1,)):
            return None
        sizes = _split_sizes(form.shape, form.order, node.with_attributes(keepdim=False))
        if sizes is None:
            return None
        return Lowered(REDUCE, ReduceProblem(node.attributes["kind"], *sizes, dtype=forms.stored))


def _is_loss(node: Node) -> bool:
    """Return True for an operator with a `reduction` argument."""
    arguments = resolve_operator(node.attributes["target"])._schema.arguments
    return any(argument.name == "reduction" for argument in arguments)


def prologue_of(node: Node) -> Expression:
    """Return the expression that a reduction applies to each element."""
    text = node.attributes.get("before")
    return Expression.parse(text) if text else IDENTITY


def are_adjacent(node: Node, rank: int) -> bool:
    """Return True for a reduction over the batch, or one that kernels compute in PyTorch's order or in NHWC."""
    if 0 in node.attributes["dims"] or (rank == 4 and _fits_layout(node, "nhwc")):
        return True
    return _split_sizes((2,) * rank, tuple(range(rank)), node) is not None


def _fits_layout(node: Node, layout: str) -> bool:
    """Return True if kernels reduce images in a layout."""
    order = _NHWC_ORDER if layout == "nhwc" else (0, 1, 2, 3)
    return _split_sizes((2, 2, 2, 2), order, node) is not None


def _split_sizes(shape: Sizes, order: tuple[int, ...], node: Node) -> tuple[int, int, int] | None:
    """Return the element counts before, in and after the reduced dimensions, in memory order.

    None if the reduced dimensions are not adjacent, or the others are in another order than in the result.
    """
    dims = node.attributes["dims"]
    reduced = [axis for axis, dim in enumerate(order) if dim in dims]
    if not reduced:
        return math.prod(shape), 1, 1
    first, last = reduced[0], reduced[-1] + 1
    kept = [dim for dim in order if dim not in dims]
    if len(reduced) != last - first or (not node.attributes["keepdim"] and kept != sorted(kept)):
        return None
    sizes = [shape[dim] for dim in order]
    return math.prod(sizes[:first]), math.prod(sizes[first:last]), math.prod(sizes[last:])
