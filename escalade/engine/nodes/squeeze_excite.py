"""The gates of squeeze-and-excite as one step: the mean of an image's channels, and two layers behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from escalade.engine.graph.forms import NAMES, STORAGE
from escalade.engine.graph.graph import Graph, Node
from escalade.engine.nodes.adaptive_avg_pool2d import AdaptiveAvgPool2d
from escalade.engine.nodes.base import Operator, Tensors
from escalade.engine.nodes.conv2d import Conv2d
from escalade.engine.nodes.linear import Linear
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.reshape import Reshape
from escalade.errors import UnsupportedError
from escalade.ops.squeeze_excite import SQUEEZE_EXCITE, SqueezeExciteProblem
from escalade.ops.squeeze_excite.reference import gates
from escalade.ops.squeeze_excite.rungs.one_launch import one_launch_pays


class SqueezeExcite(Operator):
    """A factor for each channel of an image, which the means of all channels decide on."""

    name = "squeeze_excite"

    def fuse_for_batch(self, graph: Graph, dtype: str) -> None:
        for pool in list(graph):
            gate = _find(graph, pool)
            problem = None if gate is None else gate.problem(graph, dtype)
            if gate is not None and problem is not None and one_launch_pays(problem):
                gate.join(graph)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        return gates(a["hidden"], a["gate"], inputs).reshape(node.shape)  # type: ignore[arg-type]

    def lower(self, node: Node, forms: Forms) -> Lowered:
        squeezed = forms.constant(node.inputs["weight"])[0]
        problem = _problem(node, forms.value(node.inputs["x"]).shape, squeezed, forms.stored)
        return Lowered(SQUEEZE_EXCITE, problem)


def _problem(node: Node, image: tuple[int, ...], squeezed: int, dtype: str) -> SqueezeExciteProblem:
    batch, channels, height, width = image
    return SqueezeExciteProblem(
        batch, channels, height, width, squeezed, "bias" in node.inputs, "gate_bias" in node.inputs,
        node.attributes["hidden"], node.attributes["gate"], dtype,
    )  # fmt: skip


@dataclass(frozen=True)
class _Gate:
    """The nodes of a gate, each the only reader of the one in front."""

    pool: Node
    squeeze: Node
    excite: Node
    between: tuple[Node, ...]
    """Reshapes in front of the last."""

    @property
    def node(self) -> Node:
        """One node in the place of the last."""
        inputs: dict[str, str | None] = {"x": self.pool.inputs["x"]}
        applied: dict[str, Any] = {}
        layers = (("", "hidden", self.squeeze), ("gate_", "gate", self.excite))
        for prefix, key, layer in layers:
            inputs |= {f"{prefix}{role}": layer.inputs.get(role) for role in ("weight", "bias")}
            applied[key] = _operator(layer).applied(layer).text
        sources = dict.fromkeys(node.source for node in (self.pool, self.squeeze, self.excite) if node.source)
        return replace(SqueezeExcite.instead_of(self.excite, inputs, **applied), source=", ".join(sources))

    def problem(self, graph: Graph, dtype: str) -> SqueezeExciteProblem | None:
        """What it asks for; None if the layers are between others than the channels, or too many."""
        image = tuple(size for size in graph.shape_of(self.pool.inputs["x"]) if isinstance(size, int))
        down, up = (
            graph.constants[layer.inputs["weight"]].shape[:2] for layer in (self.squeeze, self.excite)
        )
        rows = {layer.shape[0] for layer in (self.squeeze, self.excite)}
        if down[1] != image[1] or (up[0], up[1]) != (down[1], down[0]) or rows != {image[0]}:
            return None
        try:
            return _problem(self.node, image, down[0], NAMES[STORAGE[dtype]])
        except UnsupportedError:
            return None

    def join(self, graph: Graph) -> None:
        graph.nodes[self.excite.name] = self.node
        for node in (self.pool, self.squeeze, *self.between):
            del graph.nodes[node.name]


def _find(graph: Graph, pool: Node) -> _Gate | None:
    """The gate that begins with the mean over an image."""
    if not AdaptiveAvgPool2d.is_mean_of_nhwc(pool):
        return None
    layers: list[Node] = []
    between: list[Node] = []
    for node in _readers(graph, pool):
        if _is_layer(graph, node):
            layers.append(node)
        elif Reshape.matches(node):
            between.append(node)
        else:
            return None
        if len(layers) == 2:
            return _Gate(pool, layers[0], layers[1], tuple(between))
    return None


def _readers(graph: Graph, node: Node) -> Iterator[Node]:
    """The only reader of a value, the only reader of that, and so on."""
    while (reader := graph.only_user(node.name)) is not None:
        yield reader
        node = reader


def _operator(layer: Node) -> Operator:
    return Conv2d() if Conv2d.matches(layer) else Linear()


def _is_layer(graph: Graph, node: Node) -> bool:
    """Whether a node over one pixel is a layer over all channels and nothing else."""
    if (
        node.inputs.keys() - {"x", "weight", "bias"}
        or node.attributes.get("fp8")
        or node.attributes.get("store")
    ):
        return False
    if Linear.matches(node):
        return len(node.shape) == 2
    return (
        Conv2d.matches(node)
        and node.attributes["groups"] == 1
        and node.attributes["padding"] == (0, 0)
        and node.shape[2:] == (1, 1)
        and tuple(graph.constants[node.inputs["weight"]].shape[2:]) == (1, 1)
    )
