"""A loss that is the sum or mean of a function of single elements, with its gradient: both in one pass."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.base import Layouts, Operator, Tensors
from escalade.engine.nodes.gradients import depends_on, put_in_order
from escalade.engine.nodes.lowering import FP32, Forms, Lowered
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.reduce import Reduce
from escalade.engine.nodes.side_outputs import Further
from escalade.ops.base.dtypes import NAMES
from escalade.ops.expressions import Expression
from escalade.ops.pointwise_loss import POINTWISE_LOSS, PointwiseLossProblem

_LOSS = "loss"
_REDUCTIONS = ("mean", "sum")


class PointwiseLoss(Operator):
    """scale * d loss / dx of loss = mean or sum of a term of x and target, and beside it the loss."""

    name = "pointwise_loss"
    values = ("x", "target", "scale")
    mixes_types = True

    def fuse_joined(self, graph: Graph) -> None:
        """Takes the terms of a loss, their sum, and the gradient, a function of what the terms are of."""
        for total in graph:
            terms = _terms_of(total, graph)
            if terms is None:
                continue
            for gradient in graph:
                fused = _fused(terms, total, gradient, graph)
                if fused is not None:
                    graph.nodes[gradient.name] = fused
                    graph.nodes[total.name] = Further.of(fused, total.name, _LOSS, total.shape, total.dtype)
                    del graph.nodes[terms.name]
                    put_in_order(graph)
                    break

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        _, derivatives = _evaluated(node, inputs)
        return (derivatives * (inputs["scale"] * _factor(node))).to(inputs["x"].dtype)

    def further(self, node: Node, inputs: Tensors) -> Tensors:
        terms, _ = _evaluated(node, inputs)
        return {_LOSS: terms.mean() if node.attributes["reduction"] == "mean" else terms.sum()}

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts.of_all(given)

    def lower(self, node: Node, forms: Forms) -> Lowered:
        a, target = node.attributes, NAMES[forms.value(node.inputs["target"]).dtype]
        problem = PointwiseLossProblem(
            math.prod(forms.value(node.name).shape), a["expression"], a["reduction"], True, forms.stored,
            target="" if target == forms.stored else target,
        )  # fmt: skip
        return Lowered(POINTWISE_LOSS, problem, {"scale": FP32})


def _evaluated(node: Node, inputs: Tensors) -> tuple[torch.Tensor, ...]:
    """The terms and their derivatives, in fp32 at least."""
    wide = torch.promote_types(torch.promote_types(inputs["x"].dtype, inputs["target"].dtype), torch.float32)
    expression = Expression.parse(node.attributes["expression"])
    return expression.evaluate({role: inputs[role].to(wide) for role in expression.inputs})


def _factor(node: Node) -> float:
    elements = math.prod(node.shape)  # type: ignore[arg-type]
    return 1 / elements if node.attributes["reduction"] == "mean" else 1.0


def _terms_of(total: Node, graph: Graph) -> Node | None:
    """What a node is the sum or mean of, all in all, if that is a function of two values of its sizes, or of one, which
    nobody else reads."""
    if not Reduce.matches(total) or total.attributes["kind"] not in _REDUCTIONS or total.shape:
        return None
    terms = graph.nodes.get(total.inputs["x"])
    if not Pointwise.matches(terms) or graph.only_user(terms.name) is not total:
        return None
    plain = "before" not in total.attributes and Reduce().applied(total).is_identity
    known = all(
        graph.shape_of(name) == terms.shape and graph.dtype_of(name) in NAMES and name not in graph.constants
        for name in terms.inputs.values()
    )
    is_wide = total.dtype == terms.dtype == "float32"
    return terms if plain and known and is_wide and len(terms.inputs) <= 2 else None


def _fused(terms: Node, total: Node, gradient: Node, graph: Graph) -> Node | None:
    """The loss with a gradient, if it is of the same values, one of which is of its type, and of one number at most,
    times which it is everything else."""
    values = set(terms.inputs.values())
    if not Pointwise.matches(gradient) or gradient.shape != terms.shape or gradient is terms:
        return None
    scales = [name for name in gradient.inputs.values() if name not in values]
    if not values <= set(gradient.inputs.values()) or len(scales) > 1:
        return None
    if any(set(graph.shape_of(name)) - {1} or graph.dtype_of(name) is not torch.float32 for name in scales):
        return None
    if any(depends_on(name, (total.name,), graph) for name in scales):
        return None
    x = next((name for name in terms.inputs.values() if graph.dtype_of(name) == _type(gradient)), None)
    if x is None:
        return None
    target = next(iter(values - {x}), x)
    names = {target: "target", x: "x", **dict.fromkeys(scales, "scale")}
    derivative = Pointwise().expression(gradient).rename(
        {role: names[name] for role, name in gradient.inputs.items()}
    )  # fmt: skip
    found = derivative.divided_by("scale") if scales else derivative
    if found is None:
        return None
    elements = math.prod(terms.shape)  # type: ignore[arg-type]
    found = found.times(elements if total.attributes["kind"] == "mean" else 1.0)
    term = Pointwise().expression(terms).rename({role: names[name] for role, name in terms.inputs.items()})
    scale = scales[0] if scales else graph.add_constant(f"{total.name}_scale", torch.ones(()))
    return PointwiseLoss.instead_of(
        gradient, {"x": x, "target": target, "scale": scale},
        expression=term.concat(found).text, reduction=total.attributes["kind"],
    )  # fmt: skip


def _type(node: Node) -> torch.dtype:
    found: torch.dtype = getattr(torch, node.dtype)
    return found
