"""Norms that a model writes as means, roots and quotients: one LayerNorm, which reads its operand once. In training
steps: additions and casts behind their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from escalade.engine.graph.forms import NAMES
from escalade.engine.graph.graph import Graph, Node, Shape, product
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.base import activation_of
from escalade.engine.nodes.elementwise import Add
from escalade.engine.nodes.norms import GroupNorm, GroupNormBackward, LayerNorm, LayerNormBackward
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.reduce import Reduce
from escalade.engine.nodes.side_outputs import SideOutput, readers_of, side_outputs_of, with_producer
from escalade.engine.nodes.views import Reshape
from escalade.engine.passes.casts import fuse_casts_of
from escalade.engine.passes.channel_scale import channel_scale
from escalade.engine.passes.gradient_patterns import cast_source, depends_on, sort_nodes
from escalade.ops.expressions import IDENTITY, Expression
from escalade.ops.layer_norm_backward import ROUNDED

_MAX_STEPS = 4  # pointwise nodes between the variance and the quotient
_SQUARES = ("{x} * {x}", "{x} ** 2", "square({x})")
_QUOTIENTS = (
    "{x} / sqrt({v})", "{x} / ({v}) ** 0.5", "{x} * rsqrt({v})", "rsqrt({v}) * {x}", "{x} * ({v}) ** -0.5",
    "{x} * (1 / sqrt({v}))", "{x} * reciprocal(sqrt({v}))",
)  # fmt: skip
_VARIANCES = ("v + {epsilon}", "{epsilon} + v")


def recognize_norms(graph: Graph) -> None:
    """Replace (x - mean) / sqrt(variance + epsilon), or x divided by its RMS, by a LayerNorm.

    It normalizes rows, or the channels of images. Factors and terms per channel that follow become its weight and
    bias.
    """
    for node in graph:
        found = _recognized(graph, node) if Reduce.matches(node) else None
        if found is not None:
            graph.nodes[found.name] = found
    graph.remove_dead_code()
    for node in graph:
        if LayerNorm.matches(node):
            _fold_scales(graph, node)
    graph.remove_dead_code()


def unfold_instance_norms(graph: Graph) -> None:
    """Normalize the instances of a batch as N images, which may be NHWC, and not as the channels of one.

    Autograd sees `instance_norm` as the batch statistics of x viewed as [1, N * C, ...], and repeats weight and bias.
    """
    for node in graph:
        if GroupNorm.matches(node):
            _unfold(graph, node)
    graph.remove_dead_code()


def _unfold(graph: Graph, node: Node) -> None:
    """Replace a norm of one image, and its gradients, by those of the batch whose view it is."""
    x, statistics = _source(graph, node.inputs["x"]), side_outputs_of(node, graph)
    shape = () if x is None else graph.shape_of(x)
    if x is None or not _is_one_image(node, shape):
        return
    batch, channels = shape[:2]
    readers = {reader.name: reader for one in statistics for reader in graph.readers(one.name)}
    backward = next((one for one in readers.values() if GroupNormBackward.matches(one)), None)
    gradients = [] if backward is None else side_outputs_of(backward, graph)
    if readers.keys() - {one.name for one in (node, *(() if backward is None else (backward, *gradients)))}:
        return
    parameters = {role: node.inputs[role] for role in ("weight", "bias") if role in node.inputs}
    found = {role: _unrepeated(graph, name, channels) for role, name in parameters.items()}
    sums = [(_summed(graph, one, (batch, channels)), one.attributes["buffer"]) for one in gradients]
    changed = [(node, {"x": x, **found})]
    if backward is not None:
        gradient = _source(graph, backward.inputs["gradient"])
        if gradient is None or graph.shape_of(gradient) != shape:
            return
        weight = {role: name for role, name in found.items() if role in backward.inputs}
        changed.append((backward, {"x": x, "gradient": gradient, **weight}))
    if None in found.values() or any(total is None for total, _ in sums):
        return
    if not all(_is_viewed_as(graph, one, shape) for one, _ in changed):
        return
    for one, inputs in changed:
        for view in readers_of(one, graph):
            graph.remove(view, instead=one.name)
        unfolded = one.with_inputs(**inputs).with_attributes(groups=channels)
        graph.nodes[one.name] = replace(unfolded, shape=shape)
    for one in statistics:
        own = replace(one, shape=(batch, channels))
        graph.nodes[one.name] = with_producer(own, graph.nodes[node.name])
    for total, buffer in sums:
        if total is not None and backward is not None:
            made = graph.nodes[backward.name]
            graph.nodes[total.name] = SideOutput.of(made, total.name, buffer, total.shape, total.dtype)
    sort_nodes(graph)


def _is_one_image(node: Node, shape: Shape) -> bool:
    """Return True if each group of a norm is a channel of an image of a batch of this shape."""
    if len(shape) < 3:
        return False
    folded = (1, product(shape[:2]), *shape[2:])
    is_step = bool(node.attributes.get("statistics"))
    return node.shape == folded and node.attributes["groups"] == folded[1] and is_step


def _is_viewed_as(graph: Graph, node: Node, shape: Shape) -> bool:
    """Return True if all readers of a result view it in this shape."""
    readers = readers_of(node, graph)
    is_kept = graph.outputs and not {node.name, *(one.name for one in readers)}.isdisjoint(graph.outputs)
    return not is_kept and all(Reshape.matches(one) and one.shape == shape for one in readers)


def _summed(graph: Graph, gradient: Node, shape: Shape) -> Node | None:
    """Return the sum over the batch of a parameter's gradient, if nothing else reads that."""
    view = graph.only_user(gradient.name)
    total = graph.only_user(view.name) if view is not None and Reshape.matches(view) else None
    if view is None or view.shape != shape or not Reduce.matches(total) or total.shape != shape[1:]:
        return None
    is_sum = total.attributes["kind"] == "sum" and total.attributes["dims"] == (0,)
    is_plain = "before" not in total.attributes and activation_of(total).is_identity
    return total if is_sum and is_plain else None


def _source(graph: Graph, name: str) -> str | None:
    """Return what a value is a view of, in another shape."""
    node = graph.nodes.get(name)
    return node.inputs["x"] if Reshape.matches(node) else None


def _unrepeated(graph: Graph, name: str, channels: object) -> str | None:
    """Return the vector of one number per channel that a value repeats."""
    node = graph.nodes.get(name)
    if node is None or node.attributes.get("target") != "aten::repeat":
        return None
    (source,) = node.inputs.values()
    return source if graph.shape_of(source) == (channels,) else None


def fuse_norm_gradients(graph: Graph) -> None:
    """Add the gradient from another branch to that of a norm, and write the sum in a second dtype if it is cast."""
    for node in graph:
        if LayerNormBackward.matches(node):
            _add_residual(graph, node)
            _write_rounded(graph, graph.nodes[node.name])
    sort_nodes(graph)
    graph.remove_dead_code()


def _add_residual(graph: Graph, node: Node) -> None:
    """Fuse the addition that is the only reader of dx."""
    readers = readers_of(node, graph)
    if len(readers) != 1 or not Add.matches(readers[0]) or "residual" in node.inputs:
        return
    (add,) = readers
    rest = next((name for name in add.inputs.values() if name != node.name), None)
    if rest is None or rest in graph.constants or node.name in graph.outputs:
        return
    is_fusible = add.dtype == node.dtype and graph.dtype_of(rest) in NAMES and activation_of(add).is_identity
    if is_fusible and not depends_on(rest, (node.name,), graph):
        _replace(graph, node.with_inputs(residual=rest))
        graph.remove(add, instead=node.name)
        fuse_casts_of(graph, graph.nodes[node.name])


def _write_rounded(graph: Graph, node: Node) -> None:
    """Write a copy of dx in 16 bits instead of casting it."""
    casts = [
        one
        for one in readers_of(node, graph)
        if cast_source(one, graph) and graph.dtype_of(one.name).itemsize == 2
    ]
    if not casts or node.dtype != "float32":
        return
    first, *others = casts
    fused = node.with_attributes(rounded=NAMES[graph.dtype_of(first.name)])
    _replace(graph, fused)
    graph.nodes[first.name] = SideOutput.of(fused, first.name, ROUNDED, first.shape, first.dtype)
    for cast in others:
        if cast.dtype == first.dtype:
            graph.remove(cast, instead=first.name)


def _replace(graph: Graph, node: Node) -> None:
    """Replace the node of the same name, and its side outputs."""
    for one in side_outputs_of(node, graph):
        graph.nodes[one.name] = with_producer(one, node)
    graph.nodes[node.name] = node


def _recognized(graph: Graph, variance: Node) -> Node | None:
    """Return the LayerNorm whose variance, or mean square, this reduction is, in place of the quotient's node."""
    if not _is_plain(variance) or variance.attributes["kind"] not in ("mean", "var"):
        return None
    for x, mean in _sources(graph, variance):
        quotient = _quotient(graph, variance, graph.shape_of(x))
        if quotient is None or graph.dtype_of(x) != getattr(torch, quotient.dtype):
            return None
        names = {"x": x, "v": variance.name} | ({} if mean is None else {"m": mean})
        epsilon = _epsilon(_expression(graph, quotient.name, names), mean is not None)
        if epsilon is not None:
            made = LayerNorm.instead_of(quotient, {"x": x}, epsilon=epsilon, rms=mean is None, relu=False)
            is_rows = variance.attributes["dims"] == (len(quotient.shape) - 1,)
            return made if is_rows else made.with_attributes(of_channels=True)
    return None


def _is_plain(node: Node) -> bool:
    """Return True for a reduction of the last dimension, or of the channels of images, that keeps the dimension."""
    a, rank = node.attributes, len(node.shape)
    over = a["dims"] == (rank - 1,) or (rank == 4 and a["dims"] == (1,))
    is_alone = "before" not in a and activation_of(node).is_identity
    return over and a["keepdim"] and is_alone and not a["correction"] and node.is_floating


def _sources(graph: Graph, variance: Node) -> Iterator[tuple[str, str | None]]:
    """Yield the operand whose variance or mean square this may be, and the mean in the first case."""
    operand = variance.inputs["x"]
    if variance.attributes["kind"] == "var":
        yield from ((operand, mean.name) for mean in _means(graph, operand, variance))
        return
    ancestors = _ancestors(graph, operand)
    for x in ancestors:  # first: a variance is the mean square of x - mean, too
        for mean in _means(graph, x, variance):
            if _expression(graph, operand, {"x": x, "m": mean.name}) in _all(_SQUARES, x="(x - m)"):
                yield x, mean.name
    for x in ancestors:
        if _expression(graph, operand, {"x": x}) in _all(_SQUARES, x="x"):
            yield x, None


def _means(graph: Graph, x: str, variance: Node) -> list[Node]:
    return [
        node
        for node in graph.readers(x)
        if Reduce.matches(node)
        and node.attributes["kind"] == "mean"
        and node.attributes["dims"] == variance.attributes["dims"]
        and _is_plain(node)
    ]


def _ancestors(graph: Graph, name: str) -> list[str]:
    """Return up to two preceding pointwise values of the same shape, the nearest first."""
    found, last = [], [name]
    for _ in range(2):
        nodes = [graph.nodes[one] for one in last if Pointwise.matches(graph.nodes.get(one))]
        last = [value for node in nodes for value in node.inputs.values() if value not in graph.constants]
        found += [value for value in last if graph.shape_of(value) == graph.shape_of(name)]
    return list(dict.fromkeys(found))


def _quotient(graph: Graph, variance: Node, shape: object) -> Node | None:
    """Return the first node after the variance that has the shape of the operand; None if there are several."""
    node = variance
    for _ in range(_MAX_STEPS):
        readers = graph.readers(node.name)
        if len(readers) != 1 or node.name in graph.outputs or not Pointwise.matches(readers[0]):
            return None
        (node,) = readers
        if node.shape == shape:
            return node
    return None


def _expression(graph: Graph, name: str, names: dict[str, str]) -> Expression:
    """Return a value as an expression of the values in `names`, under their keys, and of its other inputs."""
    by_value = {value: key for key, value in names.items()}

    def of(value: str, depth: int) -> Expression:
        node = graph.nodes.get(value)
        if value in by_value or depth == 0 or not Pointwise.matches(node):
            return Expression((), (by_value.get(value, value),))
        expression = operator_of(node).expression(node)
        assert expression is not None
        return expression.substitute({role: of(one, depth - 1) for role, one in node.inputs.items()})

    return of(name, _MAX_STEPS + 1)


def _epsilon(quotient: Expression, has_mean: bool) -> float | None:
    """Return the epsilon of a normalized value as an expression of x, m and v; None for any other expression."""
    x = "(x - m)" if has_mean else "x"
    if quotient in _all(_QUOTIENTS, x=x, v="v"):
        return 0.0
    numbers = {one for call in quotient.calls for one in call.operands if isinstance(one, float) and one > 0}
    for number in numbers:
        for variance in _VARIANCES:
            if quotient in _all(_QUOTIENTS, x=x, v=variance.format(epsilon=repr(number))):
                return number
    return None


def _all(templates: tuple[str, ...], **names: str) -> list[Expression]:
    return [Expression.parse(template.format(**names)) for template in templates]


def _fold_scales(graph: Graph, norm: Node) -> None:
    """Fold factors and terms per channel after a norm into its weight and bias."""
    axis = 1 if norm.attributes.get("of_channels") else len(norm.shape) - 1
    while activation_of(norm) == IDENTITY and norm.name not in graph.outputs:
        reader = graph.only_user(norm.name)
        if reader is None or not Pointwise.matches(reader) or reader.shape != norm.shape:
            return
        found = channel_scale(reader, graph, axis) if reader.dtype == norm.dtype else None
        if found is None:
            return
        scale, shift = found
        weight, bias = (graph.constants.get(norm.inputs.get(role, "")) for role in ("weight", "bias"))
        scaled = scale if weight is None else weight.double() * scale
        shifted = shift if bias is None else bias.double() * scale + shift
        dtype = getattr(torch, norm.dtype)
        constants = {"weight": scaled.to(dtype)}
        if bias is not None or shifted.any():
            constants["bias"] = shifted.to(dtype)
        norm = norm.with_inputs(**graph.add_constants(norm.name, constants))
        graph.nodes[norm.name] = norm
        graph.remove(reader, instead=norm.name)
