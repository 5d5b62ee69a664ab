"""Prologue fusion: scales, gates and pointwise functions computed by the layer that reads their result."""

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
_CHANNEL_ROLES = ("gain", "shift")
"""Roles of an expression's per-channel constants."""


@dataclass(frozen=True)
class _Prologue:
    """An expression of an image `x`, per-channel `constants`, and a `gate` value per image and channel."""

    expression: Expression
    x: str
    constants: Mapping[str, torch.Tensor]
    gate: str | None = None

    @property
    def operands(self) -> dict[str, str]:
        """Operands besides x, by role; constants are placeholders that have no name in the graph yet."""
        gate = {} if self.gate is None else {"gate": self.gate}
        return {role: role for role in self.constants} | gate


def fold_prologues(graph: Graph, dtype: str, estimates: Estimates) -> None:
    """Fuse the producer in conv(relu(norm(x))) or conv(gate * x) into a 1×1 convolution, where the estimates favor it.

    The convolution has to be the only reader. Average pools take prologues too.
    """
    stored: dict[str, Form] = {}
    for node in graph:
        name = node.inputs.get("x", "")
        producer = graph.nodes.get(name)
        if producer is None:
            continue
        if operator_of(node).preparing(node, IDENTITY, {}, graph) is None:
            continue
        if graph.only_user(name) is not node:
            continue
        prologue = _channel_scale(producer, graph) or _pointwise(producer, graph)
        if prologue is None or len(prologue.expression.calls) > MOST_CALLS:
            continue
        stored = stored or stored_forms(graph, dtype)
        if not _has_readable_forms(prologue, producer, stored, dtype):
            continue
        forms = Forms(dtype, stored, graph.constants)
        if _is_faster(graph, node, producer, prologue, forms, estimates):
            _fold(graph, node, producer, prologue)


def _channel_scale(producer: Node, graph: Graph) -> _Prologue | None:
    """Return the prologue of a BatchNorm: a scale and shift per channel, with the node's epilogue."""
    operator = operator_of(producer)
    if len(producer.shape) != 4 or not operator.takes_expressions or "residual" in producer.inputs:
        return None
    scale = operator.channel_scale(operator.applying(producer, IDENTITY), graph, 1)
    if scale is None:
        return None
    constants = {role: tensor.float() for role, tensor in zip(_CHANNEL_ROLES, scale, strict=True)}
    return _Prologue(operator.applied(producer).substitute({"x": _SCALED}), producer.inputs["x"], constants)


def _pointwise(producer: Node, graph: Graph) -> _Prologue | None:
    """Return the prologue of a pointwise node with one image, up to two per-channel constants, and up to one gate."""
    expression = operator_of(producer).expression(producer)
    if expression is None or len(producer.shape) != 4 or len(expression.results) != 1:
        return None
    names: dict[str, str] = {}
    constants: dict[str, torch.Tensor] = {}
    for role in expression.inputs:
        value = producer.inputs[role]
        if value in graph.constants:
            vector = _channel_vector(graph.constants[value], producer)
            if vector is None or len(constants) == len(_CHANNEL_ROLES):
                return None
            names[role] = _CHANNEL_ROLES[len(constants)]
            constants[names[role]] = vector
        elif graph.shape_of(value) == producer.shape:
            names[role] = "x"
        elif graph.shape_of(value) == (*producer.shape[:2], 1, 1):
            names[role] = "gate"
        else:
            return None
    values = [name for name in names.values() if name not in constants]
    if "x" not in values or len(set(values)) != len(values):
        return None
    inputs = {names[role]: producer.inputs[role] for role in expression.inputs}
    return _Prologue(expression.rename(names), inputs["x"], constants, inputs.get("gate"))


def _channel_vector(constant: torch.Tensor, node: Node) -> torch.Tensor | None:
    """Return a constant as an fp32 vector per channel, if it is the same for all images and pixels."""
    channels = node.shape[1]
    sizes = (*[1] * (len(node.shape) - constant.dim()), *constant.shape)
    if not constant.is_floating_point() or sizes not in ((1, channels, 1, 1), (1, 1, 1, 1)):
        return None
    assert isinstance(channels, int)
    return constant.float().flatten().expand(channels).contiguous()


def _has_readable_forms(prologue: _Prologue, producer: Node, stored: Mapping[str, Form], dtype: str) -> bool:
    """Return True if operands have the plan's dtype, and x is NHWC like the producer's result."""
    values = [prologue.x] if prologue.gate is None else [prologue.x, prologue.gate]
    if any(name not in stored or stored[name].dtype != STORAGE[dtype] for name in (*values, producer.name)):
        return False
    return stored[prologue.x].layout == stored[producer.name].layout == "nhwc"


def _is_faster(
    graph: Graph, node: Node, producer: Node, prologue: _Prologue, forms: Forms, estimates: Estimates
) -> bool:
    """Return True if a rung for both is estimated to take less time than the two steps."""
    prepared = operator_of(node).preparing(
        node.with_inputs(x=prologue.x), prologue.expression, prologue.operands, graph
    )
    try:
        both = None if prepared is None else operator_of(prepared).lower(prepared, forms)
        choice = None if both is None else estimates.choose(_with_strided_x(both, prologue.x, graph))
    except UnsupportedError:
        return False
    if choice is None or choice.rung.last_resort:
        return False
    separate = estimates.total_us((producer, node), forms)
    return separate is not None and estimates.us(choice) < separate


def _with_strided_x(lowered: Lowered, x: str, graph: Graph) -> Lowered:
    """Return the step with a padded pixel pitch of x, if x is, or may become, part of a larger buffer."""
    nodes = [node for node in graph if node.name == x or x in node.inputs.values()]
    if not any(operator_of(node).concatenated(node) or operator_of(node).taken(node) for node in nodes):
        return lowered
    pitch = graph.shape_of(x)[1]
    assert isinstance(pitch, int)
    problem = lowered.apart({"x": (pitch // VECTOR_BYTES + 1) * VECTOR_BYTES})
    return lowered if problem is None else replace(lowered, problem=problem)


def _fold(graph: Graph, node: Node, producer: Node, prologue: _Prologue) -> None:
    constants = prologue.constants.items()
    names = {role: graph.add_constant(f"{node.name}_{role}", tensor) for role, tensor in constants}
    prepared = operator_of(node).preparing(
        node.with_inputs(x=prologue.x), prologue.expression, prologue.operands | names, graph
    )
    assert prepared is not None
    source = ", ".join(dict.fromkeys(merged.source for merged in (producer, node) if merged.source))
    graph.nodes[node.name] = replace(prepared, source=source)
    del graph.nodes[producer.name]
