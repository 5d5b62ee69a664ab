"""Prologue fusion: scales, gates, pointwise functions and zero padding, computed by the layer that reads the result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from escalade.engine.graph.forms import STORAGE, Form
from escalade.engine.graph.graph import Graph, Node, joint_source
from escalade.engine.nodes import operator_of, stored_forms
from escalade.engine.nodes.base import activation_of, with_activation
from escalade.engine.nodes.conv2d import Conv2d, is_pixelwise
from escalade.engine.nodes.lowering import Forms
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.pools import AvgPool2d
from escalade.engine.nodes.rearrange import Pad2d
from escalade.engine.nodes.reduce import Reduce, prologue_of
from escalade.engine.nodes.views import Concatenate, Slice
from escalade.engine.passes.channel_scale import channel_scale
from escalade.engine.passes.epilogues import MAX_CALLS, takes_epilogue
from escalade.engine.passes.estimates import Estimates
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
        if not _takes_prologue(node, graph) or graph.only_user(name) is not node:
            continue
        prologue = _channel_scale(producer, graph) or _pointwise(producer, graph)
        if prologue is None or len(prologue.expression.calls) > MAX_CALLS:
            continue
        stored = stored or stored_forms(graph, dtype)
        if not _has_readable_forms(prologue, producer, stored, dtype):
            continue
        forms = Forms(dtype, stored, graph.constants)
        if _is_faster(graph, node, producer, prologue, forms, estimates):
            _fold(graph, node, producer, prologue)


def _takes_prologue(node: Node, graph: Graph) -> bool:
    """Return True for 1×1 convolutions, which read each pixel once for all filters, and average pools."""
    if Conv2d.matches(node):
        return is_pixelwise(node, graph) and "shortcut" not in node.inputs and node.attributes["groups"] == 1
    return AvgPool2d.matches(node) and "prologue" not in node.attributes


def _with_prologue(node: Node, prologue: _Prologue, operands: Mapping[str, str]) -> Node:
    return node.with_inputs(x=prologue.x, **operands).with_attributes(prologue=prologue.expression.text)


def _channel_scale(producer: Node, graph: Graph) -> _Prologue | None:
    """Return the prologue of a BatchNorm: a scale and shift per channel, with the node's epilogue."""
    operator = operator_of(producer)
    if len(producer.shape) != 4 or not operator.takes_expressions or "residual" in producer.inputs:
        return None
    scale = channel_scale(with_activation(producer, IDENTITY), graph, 1)
    if scale is None:
        return None
    constants = {role: tensor.float() for role, tensor in zip(_CHANNEL_ROLES, scale, strict=True)}
    return _Prologue(activation_of(producer).substitute({"x": _SCALED}), producer.inputs["x"], constants)


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
    """Return True if a fused rung is estimated to take less time than the two steps."""
    fused = _with_prologue(node, prologue, prologue.operands)
    pitches = _pitch_of_x(prologue.x, graph) if Conv2d.matches(node) else {}  # pools read dense pixels
    choice = estimates.choice(fused, forms, pitches)
    if choice is None or choice.rung.last_resort:
        return False
    separate = estimates.total_us((producer, node), forms)
    return separate is not None and estimates.us(choice) < separate


def _pitch_of_x(x: str, graph: Graph) -> dict[str, int]:
    """Return a padded pixel pitch of x, if x is, or may become, part of a larger buffer."""
    nodes = [node for node in graph if node.name == x or x in node.inputs.values()]
    if not any(Concatenate.matches(node) or Slice.matches(node) for node in nodes):
        return {}
    pitch = graph.shape_of(x)[1]
    assert isinstance(pitch, int)
    return {"x": (pitch // VECTOR_BYTES + 1) * VECTOR_BYTES}


def _fold(graph: Graph, node: Node, producer: Node, prologue: _Prologue) -> None:
    constants = graph.add_constants(node.name, prologue.constants)
    fused = _with_prologue(node, prologue, prologue.operands | constants)
    graph.nodes[node.name] = replace(fused, source=joint_source(producer, node))
    del graph.nodes[producer.name]


def fuse_reduction_prologues(graph: Graph) -> None:
    """Fuse a pointwise function of one value into the reduction that is its only reader."""
    for node in graph:
        producer = graph.nodes.get(node.inputs["x"]) if Reduce.matches(node) else None
        if not Pointwise.matches(producer) or graph.only_user(producer.name) is not node:
            continue
        if len(producer.inputs) != 1 or producer.dtype != node.dtype:
            continue
        (x,) = producer.inputs.values()
        if x in graph.constants or graph.shape_of(x) != producer.shape:
            continue
        if graph.dtype_of(x) != getattr(torch, producer.dtype):
            continue
        expression = Pointwise().expression(producer)
        whole = prologue_of(node).substitute({"x": expression.rename({expression.inputs[0]: "x"})})
        if takes_epilogue(node, whole):
            graph.nodes[node.name] = node.with_inputs(x=x).with_attributes(before=whole.text)
    graph.remove_dead_code()


def fold_padding(graph: Graph) -> None:
    """Replace conv(pad(x)) by a convolution with more padding, if every reader of the padded image can do so."""
    for node in graph:
        zeros = _zero_padding(node)
        if zeros is None or node.name in graph.outputs:
            continue
        users = [user for user in graph if node.name in user.inputs.values()]
        if any(user.roles_of(node.name) != ["x"] for user in users):
            continue
        padded = [_with_padding(user, zeros) for user in users]
        layers = [layer for layer in padded if layer is not None]
        if len(layers) == len(users):
            graph.nodes.update({layer.name: layer for layer in layers})
            graph.remove(node, instead=node.inputs["x"])


def _zero_padding(node: Node) -> tuple[int, int] | None:
    """Return the rows and columns of zeros that a node adds on either side, if it does nothing else."""
    if not Pad2d.matches(node):
        return None
    a = node.attributes
    top, bottom, left, right = a["pads"]
    is_symmetric = top == bottom >= 0 and left == right >= 0
    return (top, left) if a["mode"] == "constant" and a["value"] == 0 and is_symmetric else None


def _with_padding(layer: Node, zeros: tuple[int, int]) -> Node | None:
    if not Conv2d.matches(layer) and not AvgPool2d.matches(layer):
        return None
    a = layer.attributes
    padding = a["padding"][0] + zeros[0], a["padding"][1] + zeros[1]
    if Conv2d.matches(layer):
        return layer.with_attributes(padding=padding)
    # The zeros were pixels of the image, so an average pool has to count them.
    if a["ceil_mode"] or (a["padding"] != (0, 0) and not a["count_padding"]):
        return None
    fits = all(2 * pad <= kernel for pad, kernel in zip(padding, a["kernel"], strict=True))
    return layer.with_attributes(padding=padding, count_padding=True) if fits else None
