"""Fusion of squeeze-and-excite gates: the mean over an image and the two layers after it, in one launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from escalade.engine.graph.forms import NAMES, STORAGE
from escalade.engine.graph.graph import Graph, Node, joint_source
from escalade.engine.nodes.base import activation_of
from escalade.engine.nodes.conv2d import Conv2d
from escalade.engine.nodes.linear import Linear
from escalade.engine.nodes.mlp import SqueezeExcite, gate_problem
from escalade.engine.nodes.pools import AdaptiveAvgPool2d
from escalade.engine.nodes.views import Reshape
from escalade.errors import UnsupportedError
from escalade.ops.squeeze_excite import SqueezeExciteProblem, one_launch_pays


def fuse_squeeze_excite(graph: Graph, dtype: str) -> None:
    """Fuse every gate for which one launch is faster than three."""
    for pool in list(graph):
        gate = _find(graph, pool)
        problem = None if gate is None else _problem(gate, graph, dtype)
        if gate is not None and problem is not None and one_launch_pays(problem):
            graph.nodes[gate.excite.name] = gate.fused
            for node in (gate.pool, gate.squeeze, *gate.reshapes):
                del graph.nodes[node.name]


@dataclass(frozen=True)
class _Gate:
    """Nodes of a gate, each the only reader of the previous one."""

    pool: Node
    squeeze: Node
    excite: Node
    reshapes: tuple[Node, ...]

    @property
    def fused(self) -> Node:
        inputs: dict[str, str | None] = {"x": self.pool.inputs["x"]}
        activations: dict[str, Any] = {}
        for prefix, key, layer in (("", "hidden", self.squeeze), ("gate_", "gate", self.excite)):
            inputs |= {f"{prefix}{role}": layer.inputs.get(role) for role in ("weight", "bias")}
            activations[key] = activation_of(layer).text
        fused = SqueezeExcite.instead_of(self.excite, inputs, **activations)
        return replace(fused, source=joint_source(self.pool, self.squeeze, self.excite))


def _problem(gate: _Gate, graph: Graph, dtype: str) -> SqueezeExciteProblem | None:
    """Return the problem of a gate; None if the layers do not map the channels to themselves, or are too large."""
    image = tuple(size for size in graph.shape_of(gate.pool.inputs["x"]) if isinstance(size, int))
    down, up = (graph.constants[layer.inputs["weight"]].shape[:2] for layer in (gate.squeeze, gate.excite))
    rows = {layer.shape[0] for layer in (gate.squeeze, gate.excite)}
    if down[1] != image[1] or (up[0], up[1]) != (down[1], down[0]) or rows != {image[0]}:
        return None
    try:
        return gate_problem(gate.fused, image, down[0], NAMES[STORAGE[dtype]])
    except UnsupportedError:
        return None


def _find(graph: Graph, pool: Node) -> _Gate | None:
    """Return the gate that starts with the mean over an image."""
    if not AdaptiveAvgPool2d.is_nhwc_mean(pool):
        return None
    layers: list[Node] = []
    reshapes: list[Node] = []
    for node in _reader_chain(graph, pool):
        if _is_layer(graph, node):
            layers.append(node)
        elif Reshape.matches(node):
            reshapes.append(node)
        else:
            return None
        if len(layers) == 2:
            return _Gate(pool, layers[0], layers[1], tuple(reshapes))
    return None


def _reader_chain(graph: Graph, node: Node) -> Iterator[Node]:
    """Yield the only reader of a node, the only reader of that one, and so on."""
    while (reader := graph.only_user(node.name)) is not None:
        yield reader
        node = reader


def _is_layer(graph: Graph, node: Node) -> bool:
    """Return True for a linear layer, or a 1×1 convolution of one pixel, over all channels."""
    a = node.attributes
    if node.inputs.keys() - {"x", "weight", "bias"} or a.get("quantized") or a.get("store"):
        return False
    if Linear.matches(node):
        return len(node.shape) == 2
    return (
        Conv2d.matches(node)
        and a["groups"] == 1
        and a["padding"] == (0, 0)
        and node.shape[2:] == (1, 1)
        and tuple(graph.constants[node.inputs["weight"]].shape[2:]) == (1, 1)
    )
