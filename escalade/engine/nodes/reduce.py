"""Sums, means, extremes, variances, norms and logarithms of sums of exponentials over any dimensions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from escalade.engine.graph.aten import resolve_operator
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.aten_call import AtenCall, converts, name_of
from escalade.engine.nodes.base import Layouts, Operator, Recognised, Tensors, activate
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.pointwise import Pointwise, broadcast
from escalade.engine.nodes.sequences import dimension_of_image
from escalade.engine.nodes.signature import (
    ANY,
    EPSILON,
    FLAG,
    RESULT,
    Attribute,
    Attributes,
    Signature,
    SizeError,
    Sizes,
    is_whole,
)
from escalade.ops.expressions import IDENTITY, Expression
from escalade.ops.reduce import REDUCE, ReduceProblem

_IMAGE_ORDER = (0, 2, 3, 1)
"""The dimensions of an image as they lie in NHWC."""


@dataclass(frozen=True)
class _Kind:
    """One way to reduce: by PyTorch, and as a kind of the operation with expressions in front and behind."""

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
_NORMS = {1.0: "norm1", 2.0: "norm2", math.inf: "norm_inf"}
_OF_REDUCTIONS = {1: "mean", 2: "sum"}
"""What PyTorch's losses do with their terms, by the numbers that it has for that."""
_OF_NAMES = {"max": "amax", "min": "amin", "special_logsumexp": "logsumexp"}
"""PyTorch's operators that have other names here: without a dimension, or with one and for their first result."""


def _are_dimensions(value: Any) -> bool:
    return (
        type(value) is tuple
        and all(is_whole(dim, most=15) for dim in value)
        and list(value) == sorted(set(value))
    )


class Reduce(Operator):
    """y = kind of x over `dims`, with an expression in front of each element and another behind each result."""

    name = "reduce"
    signature = Signature(
        {"x": ANY},
        {
            "kind": Attribute(f"one of {', '.join(_KINDS)}", lambda value: type(value) is str and value in _KINDS),
            "dims": Attribute("dimensions in order, each once", _are_dimensions),
            "keepdim": FLAG,
            "correction": EPSILON,
            "relu": FLAG,
        },
    )  # fmt: skip
    takes_expressions = True

    # How it is recognised.

    def recognise_rest(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        """Recognises by name what no other operator takes: a mean over an image is a pool."""
        name, x = name_of(node.attributes["target"]), call.value("self")
        if _is_reduced(node) and x is not None and not node.shape:
            return self._loss(node, call, graph)
        kind = _OF_NAMES.get(name, name)
        if name == "linalg_vector_norm":
            kind = _NORMS.get(float(call("ord", 2)), "")
        if kind not in _KINDS or x is None or not self._is_plain(node, call, x, graph):
            return None
        rank = len(graph.shape_of(x))
        asked = call("dim", ())
        asked = (asked,) if isinstance(asked, int) else tuple(asked)
        dims = tuple(sorted({dim % rank for dim in asked})) if asked and rank else tuple(range(rank))
        correction = call("correction", int(call("unbiased", True))) if kind in ("var", "std") else 0
        if correction < 0:
            return None
        return self.instead_of(
            node, {"x": x}, kind=kind, dims=dims, keepdim=bool(call("keepdim", False)), correction=correction,
            relu=False,
        )  # fmt: skip

    def _loss(self, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        """The mean or sum of a loss of single elements."""
        kind = _OF_REDUCTIONS.get(call("reduction", 1))
        shape = broadcast(map(graph.shape_of, node.inputs.values()))
        if kind is None or shape is None:
            return None
        arguments = {**node.attributes["arguments"], "reduction": 0}
        each = replace(node, name=graph.fresh(f"{node.name}_terms"), shape=shape)
        each = each.with_attributes(arguments=arguments)
        terms = Pointwise().recognise_rest(each, AtenCall(each), graph)
        if not isinstance(terms, Node):
            return None
        graph.append(terms)
        return self.instead_of(
            node, {"x": terms.name}, kind=kind, dims=tuple(range(len(shape))), keepdim=False, correction=0,
            relu=False,
        )  # fmt: skip

    @staticmethod
    def _is_plain(node: Node, call: AtenCall, x: str, graph: Graph) -> bool:
        """Whether it is of floating-point numbers, in their own type, and gives nothing else."""
        return (
            node.is_floating
            and graph.dtype_of(x) == getattr(torch, node.dtype)
            and not converts(call, x, graph)
            and call.value("other") is None
            and node.attributes.get("result", 0) == 0
        )

    def fuse(self, graph: Graph, dtype: str) -> None:
        """Takes the functions of single elements in front, which nobody else reads."""
        for node in graph:
            if not self.matches(node):
                continue
            front = graph.nodes.get(node.inputs["x"])
            if not Pointwise.matches(front) or graph.only_user(front.name) is not node:
                continue
            expression = Pointwise().expression(front)
            (x,) = front.inputs.values() if len(front.inputs) == 1 else (None,)
            if expression is None or x is None or x in graph.constants or front.dtype != node.dtype:
                continue
            if graph.shape_of(x) != front.shape or graph.dtype_of(x) != getattr(torch, front.dtype):
                continue
            before = _before(node).substitute({"x": expression.rename({expression.inputs[0]: "x"})})
            if self.takes(node, before):
                graph.nodes[node.name] = node.with_inputs(x=x).with_attributes(before=before.text)
        graph.remove_dead_code()

    # What it computes.

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        (x,) = _before(node).evaluate({"x": inputs["x"]})
        more = {"correction": a["correction"]} if a["kind"] in ("var", "std") else {}
        if not a["dims"]:  # of a single number, which PyTorch takes as all dimensions
            return activate(node, _KINDS[a["kind"]].compute(x.reshape(1), (0,), keepdim=False, **more))
        return activate(node, _KINDS[a["kind"]].compute(x, a["dims"], keepdim=a["keepdim"], **more))

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        x, dims = sizes["x"], attributes["dims"]
        if dims and dims[-1] >= len(x):
            raise SizeError(f"there is no dimension {dims[-1]} of {len(x)}")
        if attributes["kind"] in ("amax", "amin", "norm_inf") and 0 in (x[dim] for dim in dims):
            raise SizeError("there is no extreme of nothing")
        kept = [1 if dim in dims else size for dim, size in enumerate(x)]
        left = kept if attributes["keepdim"] else [size for dim, size in enumerate(x) if dim not in dims]
        return {RESULT: tuple(left)}

    def as_image(self, node: Node) -> Attributes | None:
        dims = tuple(dimension_of_image(dim) for dim in node.attributes["dims"])
        return {**node.attributes, "dims": dims} if node.attributes["keepdim"] else None

    # Who does it.

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        """Reads x as it lies, if what is reduced then lies together, and what is left in the result's order."""
        lies = given.get("x", "nchw")
        if lies == "nhwc" and _sizes((2, 2, 2, 2), _IMAGE_ORDER, node) is None:
            return Layouts("nchw", "nchw")
        return Layouts(None, lies if node.attributes["keepdim"] else "nchw")

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        form = forms.value(node.inputs["x"])
        order = _IMAGE_ORDER if form.layout == "nhwc" else tuple(range(len(form.shape)))
        sizes = _sizes(form.shape, order, node)
        if sizes is None or 0 in form.shape:
            return None
        kind = _KINDS[node.attributes["kind"]]
        before = Expression.parse(kind.before).substitute({"x": _before(node)})
        after = self.applied(node).substitute({"x": Expression.parse(kind.after)})
        problem = ReduceProblem(
            kind.kind, *sizes, float(node.attributes["correction"]), before.text, activation=after.text,
            dtype=forms.stored,
        )  # fmt: skip
        return Lowered(REDUCE, problem)


def _is_reduced(node: Node) -> bool:
    """Whether it is a loss that says what it does with its terms."""
    arguments = resolve_operator(node.attributes["target"])._schema.arguments
    return any(argument.name == "reduction" for argument in arguments)


def _before(node: Node) -> Expression:
    """What a node computes of each element first."""
    text = node.attributes.get("before")
    return Expression.parse(text) if text else IDENTITY


def _sizes(shape: Sizes, order: tuple[int, ...], node: Node) -> tuple[int, int, int] | None:
    """Sizes in front of what is reduced, of that itself, and behind it, in the order of memory; None if it does not lie
    together, or what is left would lie in another order than the result."""
    dims = node.attributes["dims"]
    places = [place for place, dim in enumerate(order) if dim in dims]
    if not places:
        return math.prod(shape), 1, 1
    first, last = places[0], places[-1] + 1
    left = [dim for dim in order if dim not in dims]
    if len(places) != last - first or (not node.attributes["keepdim"] and left != sorted(left)):
        return None
    sizes = [shape[dim] for dim in order]
    return math.prod(sizes[:first]), math.prod(sizes[first:last]), math.prod(sizes[last:])
