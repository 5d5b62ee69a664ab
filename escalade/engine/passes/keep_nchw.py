"""Convolutions in the layout of the caller's images, without the conversions before and after them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import layout_of, operator_of
from escalade.engine.nodes.base import activation_fields, activation_of, with_activation
from escalade.engine.nodes.batch_norm import STATISTICS, BatchNorm
from escalade.engine.nodes.conv2d import Conv2d, ConvTranspose2d
from escalade.engine.nodes.convert import Convert
from escalade.engine.nodes.lowering import Forms
from escalade.engine.nodes.pointwise import Pointwise
from escalade.engine.nodes.stem import FewChannels
from escalade.engine.passes.channel_order import writing_channels
from escalade.engine.passes.epilogues import MAX_CALLS
from escalade.engine.passes.estimates import Estimates, assumed_forms
from escalade.ops.expressions import Expression
from escalade.ops.shared.activation import VECTORS

IN_NCHW = ("tf32",)
"""Dtypes with a convolution in NCHW on tensor cores."""
IN_PLANES = "planes"
"""Rung of both operations."""
MOST_NODES = 12
"""Largest number of steps between two conversions: a network has more, and NHWC is faster in it."""


def keep_nchw(graph: Graph, dtype: str, estimates: Estimates) -> None:
    """Compute convolutions and the layers around them in NCHW, where the estimates favor it to converting twice."""
    if dtype not in IN_NCHW or graph.typed or graph.images != "nchw":
        return
    for node in graph:
        if node.name in graph.nodes and _converts_to(node, "nhwc"):
            steps = _between_conversions(graph, node)
            trial = _without_conversions(graph, steps) if steps else None
            if trial is not None and _is_faster(graph, trial, steps, dtype, estimates):
                graph.nodes, graph.constants, graph.outputs = trial.nodes, trial.constants, trial.outputs
                graph.remove_dead_code()


def _converts_to(node: Node, layout: str) -> bool:
    return Convert.matches(node) and node.attributes["layout"] == layout


def _between_conversions(graph: Graph, first: Node) -> list[Node]:
    """Return all nodes connected to a conversion by NHWC images, in order; empty if there are more than the limit."""
    users = graph.users()
    found, pending = {first.name}, [first]
    while pending:
        node = pending.pop()
        connected = [] if _converts_to(node, "nhwc") else [graph.nodes.get(n) for n in node.inputs.values()]
        neighbors = [n for n in connected if n is not None and _is_nhwc_image(n)]
        if _is_nhwc_image(node):
            neighbors += users.get(node.name, [])
        for neighbor in neighbors:
            if neighbor.name not in found:
                found.add(neighbor.name)
                pending.append(neighbor)
        if len(found) > MOST_NODES:
            return []
    return [node for node in graph if node.name in found]


def _is_convolution(node: Node) -> bool:
    return Conv2d.matches(node) or ConvTranspose2d.matches(node) or FewChannels.matches(node)


def _is_nhwc_image(node: Node) -> bool:
    return len(node.shape) == 4 and layout_of(node) == "nhwc"


def _without_conversions(graph: Graph, steps: Iterable[Node]) -> Graph | None:
    """Return a graph with these nodes in NCHW; None if one of them needs NHWC, or if none is a convolution."""
    trial = graph.copy()
    in_nchw = {entry.name for entry in graph.inputs if len(entry.shape) == 4}
    has_convolution = False
    for node in steps:
        node = trial.nodes[node.name]
        if _converts_to(node, "nhwc"):
            source = node.inputs["x"]
            if "scale" in node.inputs or not _is_plain_image(source, graph):
                return None
            trial.remove(node, instead=source)
            in_nchw.add(source)
        elif _converts_to(node, "nchw"):
            if not _remove_output_conversion(trial, node):
                return None
        else:
            changed = _in_nchw(trial, node, in_nchw)
            if changed is None:
                return None
            trial.nodes[node.name] = changed
            has_convolution |= _is_convolution(node)
            in_nchw.add(node.name)
    _fuse_vectors(trial, steps)
    return trial if has_convolution else None


def _fuse_vectors(graph: Graph, steps: Iterable[Node]) -> None:
    """Let convolutions apply functions of their result and of one or two vectors, such as mish(x) * a + b."""
    for node in (graph.nodes[step.name] for step in steps if step.name in graph.nodes):
        images = [name for name in node.inputs.values() if name not in graph.constants]
        layer = graph.nodes.get(images[0]) if len(images) == 1 else None
        if (
            layer is None
            or not Conv2d.matches(layer)
            or VECTORS[0] in layer.inputs
            or layer.dtype != node.dtype
        ):
            continue
        applied = _function_of_vectors(graph, node) if graph.only_user(layer.name) is node else None
        if applied is None or layer.shape != node.shape:
            continue
        expression, vectors = applied
        whole = expression.substitute({"x": activation_of(layer)})
        if len(whole.calls) <= MAX_CALLS:
            operands = graph.add_constants(node.name, vectors)
            graph.nodes[layer.name] = with_activation(layer.with_inputs(**operands), whole)
            graph.remove(node, instead=layer.name)


def _function_of_vectors(graph: Graph, node: Node) -> tuple[Expression, dict[str, torch.Tensor]] | None:
    """Return a node as an expression of x and of vectors by name; None if it has no such form."""
    if BatchNorm.matches(node):
        weight, bias, mean, variance = (graph.constants[node.inputs[role]].double() for role in STATISTICS)
        scale = weight / (variance + node.attributes["epsilon"]).sqrt()
        scaled = Expression.parse("x * a + b")
        return activation_of(node).substitute({"x": scaled}), {
            "a": scale.float(),
            "b": (bias - mean * scale).float(),
        }
    expression = operator_of(node).expression(node)
    others = {role: graph.constants[name] for role, name in node.inputs.items() if name in graph.constants}
    if expression is None or len(others) > len(VECTORS):
        return None
    sizes = {role: (1,) * (4 - one.dim()) + tuple(one.shape) for role, one in others.items()}
    if any(
        size != (1, size[1], 1, 1) or not others[role].is_floating_point() for role, size in sizes.items()
    ):
        return None
    (image,) = (role for role in node.inputs if role not in others)
    named = dict(zip(others, VECTORS, strict=False))
    vectors = {named[role]: one.reshape(-1).float().expand(node.shape[1]) for role, one in others.items()}  # type: ignore[arg-type]
    return expression.rename({image: "x", **named}), vectors


def _is_plain_image(name: str, graph: Graph) -> bool:
    """Return True for an image that kernels can read: computed by one, or given in fp32."""
    entry = next((entry for entry in graph.inputs if entry.name == name), None)
    # Kernels in tf32 read fp32 images; inputs of other dtypes need the conversion to cast them.
    if entry is not None:
        return entry.dtype == "float32"
    return name in graph.nodes and layout_of(graph.nodes[name]) == "nchw"


def _in_nchw(graph: Graph, node: Node, in_nchw: set[str]) -> Node | None:
    """Return the node with NCHW input and output; None if it has no NCHW kernel."""
    images = {role: "nchw" for role, name in node.inputs.items() if name in in_nchw}
    if not _is_convolution(node):
        layouts = operator_of(node).layouts(node, images)
        if layouts.read not in (None, "nchw") or (len(node.shape) == 4 and layouts.written != "nchw"):
            return None
        return node.with_attributes(layout="nchw") if len(node.shape) == 4 else node
    if FewChannels.matches(node):
        if node.attributes["pool"] > 1 or node.attributes["normalised"]:
            return None
        node = Conv2d.instead_of(
            node, dict(node.inputs),
            stride=(1, 1), padding=node.attributes["padding"], dilation=(1, 1), groups=1, **activation_fields(node),
        )  # fmt: skip
    a = node.attributes
    if a["groups"] != 1 or "prologue" in a or "shortcut" in node.inputs or not images:
        return None
    weight = graph.constants.get(node.inputs["weight"])
    if weight is None:
        return None
    if ConvTranspose2d.matches(node):
        return node.with_attributes(layout="nchw")
    channels = graph.shape_of(node.inputs["x"])[1]
    if weight.shape[1] != channels:  # padded for NHWC
        padded = graph.add_constant(f"{node.name}_weight", weight[:, :channels].contiguous())
        node = node.with_inputs(weight=padded)
    return node.with_attributes(layout="nchw")


def _remove_output_conversion(graph: Graph, node: Node) -> bool:
    """Remove a conversion of an image that is already in NCHW, or reduce it to its scale and shift."""
    source = node.inputs["x"]
    producer = graph.nodes.get(source)
    if producer is None or node.dtype != "float32":
        return False
    if producer.shape[1] != node.shape[1]:  # padded for NHWC
        channels = node.shape[1]
        assert isinstance(channels, int)
        made = writing_channels(producer, tuple(range(channels)), graph)
        if made is None or len(graph.readers(source)) > 1:
            return False
        graph.nodes[source] = made
    if "scale" not in node.inputs:
        graph.remove(node, instead=source)
        return True
    vectors = {
        role: graph.add_constant(f"{node.name}_{name}", graph.constants[node.inputs[name]].view(1, -1, 1, 1))
        for role, name in (("a", "scale"), ("b", "shift"))
    }
    scaled = Pointwise.instead_of(node, {"x": source, **vectors}, expression="x * a + b", layout="nchw")
    graph.nodes[node.name] = scaled
    return True


def _is_faster(graph: Graph, trial: Graph, steps: list[Node], dtype: str, estimates: Estimates) -> bool:
    forms = assumed_forms(trial, dtype, "nchw")
    changed = [trial.nodes[node.name] for node in steps if node.name in trial.nodes]
    # Other rungs convert to NHWC themselves, or use CUDA cores.
    if not all(_is_fast_in_nchw(node, forms, estimates) for node in changed if _is_convolution(node)):
        return False
    before = estimates.total_us(steps, assumed_forms(graph, dtype, "nchw"))
    after = estimates.total_us(changed, forms)
    return before is not None and after is not None and after < before


def _is_fast_in_nchw(node: Node, forms: Forms, estimates: Estimates) -> bool:
    """Return True if tensor cores compute a convolution in NCHW, without converting it; not on every card."""
    choice = estimates.choice(node, forms)
    return choice is not None and choice.rung.name == IN_PLANES
