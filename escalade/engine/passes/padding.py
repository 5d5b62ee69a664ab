"""Folding of zero padding into the layers that read the padded image."""

from __future__ import annotations

from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.conv2d import Conv2d
from escalade.engine.nodes.pools import AvgPool2d
from escalade.engine.nodes.rearrange import Pad2d


def fold_padding(graph: Graph) -> None:
    """Replace conv(pad(x)) by a convolution with more padding, if every reader of the padded image can do so."""
    for node in graph:
        zeros = _zero_padding(node)
        if zeros is None or node.name in graph.outputs:
            continue
        users = [user for user in graph if node.name in user.inputs.values()]
        if any([role for role, name in user.inputs.items() if name == node.name] != ["x"] for user in users):
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
