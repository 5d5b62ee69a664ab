"""Scales, gates and functions of single elements done on the way into the layer behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from escalade.engine.graph.forms import STORAGE, Form
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of, stored_forms
from escalade.engine.nodes.base import MOST_CALLS
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.passes.estimates import Estimates
from escalade.errors import UnsupportedError
from escalade.ops.base.dtypes import VECTOR_BYTES
from escalade.ops.expressions import IDENTITY, Expression

_SCALED = Expression.parse("gain * x + shift")
_BY_CHANNEL = ("gain", "shift")
"""What an expression's constants by channel become."""


@dataclass(frozen=True)
class _Front:
    """What a node does with an image: an expression in `x`, of `constants` by channel and of a value, `gate`, by image
    and channel."""

    expression: Expression
    x: str
    constants: Mapping[str, torch.Tensor]
    gate: str | None = None

    @property
    def operands(self) -> dict[str, str]:
        """The names of what it reads besides x, those of its constants yet to be found."""
        gate = {} if self.gate is None else {"gate": self.gate}
        return {role: role for role in self.constants} | gate


def fold_prologues(graph: Graph, dtype: str, estimates: Estimates) -> None:
    """conv(relu(norm(x))) and conv(gate * x) become 1×1 convolutions that do so with what they read, where by the
    estimates one step is sooner done than two. Nothing but the convolution reads what the step in front makes. Means
    over windows do the same.
    """
    forms: dict[str, Form] = {}
    for node in graph:
        name = node.inputs.get("x", "")
        first = graph.nodes.get(name)
        if first is None:
            continue
        if (
            operator_of(node).preparing(node, IDENTITY, {}, graph) is None
            or graph.only_user(name) is not node
        ):
            continue
        front = _scaling(first, graph) or _pointwise(first, graph)
        if front is None or len(front.expression.calls) > MOST_CALLS:
            continue
        forms = forms or stored_forms(graph, dtype)
        if not _are_readable(front, first, forms, dtype):
            continue
        asking = Forms(dtype, forms, graph.constants)
        if _pays(graph, node, first, front, asking, estimates):
            _fold(graph, node, first, front)


def _scaling(first: Node, graph: Graph) -> _Front | None:
    """A factor and a term for each channel, and whatever the node applies to that: a BatchNorm."""
    operator = operator_of(first)
    if len(first.shape) != 4 or not operator.takes_expressions or "residual" in first.inputs:
        return None
    found = operator.channel_scale(operator.applying(first, IDENTITY), graph, 1)
    if found is None:
        return None
    constants = {role: tensor.float() for role, tensor in zip(_BY_CHANNEL, found, strict=True)}
    return _Front(operator.applied(first).substitute({"x": _SCALED}), first.inputs["x"], constants)


def _pointwise(first: Node, graph: Graph) -> _Front | None:
    """An expression of one image, of up to two constants by channel, and of one value by image and channel."""
    expression = operator_of(first).expression(first)
    if expression is None or len(first.shape) != 4 or len(expression.results) != 1:
        return None
    names: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    for role in expression.inputs:
        value = first.inputs[role]
        if value in graph.constants:
            along = _along_channels(graph.constants[value], first)
            if along is None or len(constants) == len(_BY_CHANNEL):
                return None
            names[role] = _BY_CHANNEL[len(constants)]
            constants[names[role]] = along
        elif graph.shape_of(value) == first.shape:
            names[role] = "x"
        elif graph.shape_of(value) == (*first.shape[:2], 1, 1):
            names[role] = "gate"
        else:
            return None
    made = [name for name in names.values() if name not in constants]
    if "x" not in made or len(set(made)) != len(made):
        return None
    given = {names[role]: first.inputs[role] for role in expression.inputs}
    return _Front(expression.rename(names), given["x"], constants, given.get("gate"))


def _along_channels(constant: torch.Tensor, node: Node) -> torch.Tensor | None:
    """A constant as a vector of fp32 by channel, if it is the same for all images and pixels of a node's result."""
    channels = node.shape[1]
    sizes = (*[1] * (len(node.shape) - constant.dim()), *constant.shape)
    if not constant.is_floating_point() or sizes not in ((1, channels, 1, 1), (1, 1, 1, 1)):
        return None
    assert isinstance(channels, int)
    return constant.float().flatten().expand(channels).contiguous()


def _are_readable(front: _Front, first: Node, forms: Mapping[str, Form], dtype: str) -> bool:
    """Whether a layer can read what the node in front of it has read: values of the plan's own type, and an
    image that lies as that node's result does."""
    values = [front.x] if front.gate is None else [front.x, front.gate]
    if any(name not in forms or forms[name].dtype != STORAGE[dtype] for name in (*values, first.name)):
        return False
    return forms[front.x].layout == forms[first.name].layout == "nhwc"


def _pays(
    graph: Graph,
    node: Node,
    first: Node,
    front: _Front,
    asking: Forms,
    estimates: Estimates,
) -> bool:
    """Whether a rung does both in less time than the two that do one after the other."""
    prepared = operator_of(node).preparing(
        node.with_inputs(x=front.x), front.expression, front.operands, graph
    )
    try:
        both = None if prepared is None else operator_of(prepared).lower(prepared, asking)
        together = None if both is None else estimates.chosen(_as_it_may_lie(both, front.x, graph))
    except UnsupportedError:
        return False
    if together is None or together.rung.last_resort:
        return False
    alone = estimates.of_nodes((first, node), asking)
    return alone is not None and estimates.us(together) < alone


def _as_it_may_lie(lowered: Lowered, x: str, graph: Graph) -> Lowered:
    """The step with the pixels of x apart, if that is a part of something larger, or may become one."""
    nodes = [node for node in graph if node.name == x or x in node.inputs.values()]
    if not any(operator_of(node).concatenated(node) or operator_of(node).taken(node) for node in nodes):
        return lowered
    pitch = graph.shape_of(x)[1]
    assert isinstance(pitch, int)
    problem = lowered.apart({"x": (pitch // VECTOR_BYTES + 1) * VECTOR_BYTES})
    return lowered if problem is None else replace(lowered, problem=problem)


def _fold(graph: Graph, node: Node, first: Node, front: _Front) -> None:
    names = {
        role: graph.add_constant(f"{node.name}_{role}", tensor) for role, tensor in front.constants.items()
    }
    prepared = operator_of(node).preparing(
        node.with_inputs(x=front.x), front.expression, front.operands | names, graph
    )
    assert prepared is not None
    source = ", ".join(dict.fromkeys(one.source for one in (first, node) if one.source))
    graph.nodes[node.name] = replace(prepared, source=source)
    del graph.nodes[first.name]
