"""Sinking of permutations past other operators, until two of them cancel."""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes import operator_of
from escalade.engine.nodes.conv2d import Conv2d
from escalade.engine.nodes.linear import Linear
from escalade.engine.nodes.norms import LayerNorm, LogSoftmax, Softmax
from escalade.engine.nodes.views import CHANNELS_LAST, Permute


def sink_permutes(graph: Graph) -> None:
    """Replace f(permute(x)) by permute(g(x)) where an operator has such a g.

    A block that permutes to channels-last for a norm and two linear layers, and back, then has no permutation left, and
    its linear layers become 1×1 convolutions, with their fusions.
    """
    for node in graph:
        if Permute.matches(node):
            _compose(graph, node)
        else:
            _sink(graph, node)
    graph.remove_dead_code()


def _compose(graph: Graph, node: Node) -> None:
    """Merge a permutation with a preceding one; remove both if they cancel."""
    before = graph.nodes.get(node.inputs["x"])
    if not Permute.matches(before):
        return
    first, second = before.attributes["order"], node.attributes["order"]
    order = tuple(first[dim] for dim in second)
    if order == tuple(range(len(order))):
        graph.remove(node, instead=before.inputs["x"])
    else:
        both = node.with_inputs(x=before.inputs["x"]).with_attributes(order=order)
        graph.nodes[node.name] = both


def _sink(graph: Graph, node: Node) -> None:
    values = {role: name for role, name in node.inputs.items() if name not in graph.constants}
    permutes = [graph.nodes.get(name) for name in values.values()]
    matching = [permute for permute in permutes if Permute.matches(permute)]
    if not matching or len(matching) != len(permutes):
        return
    orders = {permute.attributes["order"] for permute in matching}
    if len(orders) > 1:
        return
    (order,) = orders
    moved = _before_permute(node, order, graph)
    if moved is None:
        return
    sources = {name: graph.nodes[name].inputs["x"] for name in values.values()}
    inputs = {role: sources.get(name, name) for role, name in moved.inputs.items()}
    name = graph.fresh(f"{node.name}_unpermuted")
    graph.insert_before(node.name, replace(moved, name=name, inputs=inputs))
    graph.nodes[node.name] = Permute.instead_of(node, {"x": name}, order=order)


def _before_permute(node: Node, order: tuple[int, ...], graph: Graph) -> Node | None:
    """Return the node g with permute(g(x)) = node(permute(x)), still reading the permuted values; None without one."""
    if len(node.shape) != len(order):
        return None
    shape = tuple(size for _, size in sorted(zip(order, node.shape, strict=True), key=lambda pair: pair[0]))
    moved = replace(node, shape=shape)
    if operator_of(node).expression(node) is not None:
        return moved.with_inputs(**_unpermuted_constants(node, order, graph))
    if order != CHANNELS_LAST:
        return None
    # Rows of channels are the pixels of an image.
    if Linear.matches(node):
        weight = graph.constants[node.inputs["weight"]][:, :, None, None]
        return Conv2d.instead_of(
            moved, {**node.inputs, "weight": graph.add_constant(f"{node.name}_weight", weight)},
            stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1, relu=node.attributes["relu"],
        )  # fmt: skip
    takes_channels = any(kind.matches(node) for kind in (Softmax, LogSoftmax, LayerNorm))
    is_rows = takes_channels and not node.attributes.get("of_channels")
    return moved.with_attributes(of_channels=True) if is_rows else None


def _unpermuted_constants(node: Node, order: tuple[int, ...], graph: Graph) -> dict[str, str]:
    constants = {}
    for role, name in node.inputs.items():
        if name in graph.constants:
            constant = graph.constants[name]
            whole = constant.view(*[1] * (len(order) - constant.dim()), *constant.shape)
            moved = whole.permute([order.index(dim) for dim in range(len(order))])
            constants[role] = graph.add_constant(f"{node.name}_{role}", moved.contiguous())
    return constants
