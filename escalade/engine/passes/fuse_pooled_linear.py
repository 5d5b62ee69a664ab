"""Fusion of the mean over an image into the linear layer that reads it."""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.forms import unquantized
from escalade.engine.graph.graph import Graph, Node, Shape, joint_source
from escalade.engine.nodes.linear import Linear
from escalade.engine.nodes.lowering import problem_from
from escalade.engine.nodes.pools import AdaptiveAvgPool2d
from escalade.engine.nodes.views import Reshape
from escalade.ops.linear import LinearProblem, one_launch_pays


def fuse_pooled_linear(graph: Graph, dtype: str) -> None:
    """Replace linear(flatten(mean(x))) by one step that reads the NHWC image x, where one launch is faster."""
    for node in graph:
        if not AdaptiveAvgPool2d.is_nhwc_mean(node):
            continue
        image = graph.shape_of(node.inputs["x"])
        rows = graph.only_user(node.name)
        if not Reshape.matches(rows) or rows.shape != image[:2]:
            continue
        layer = graph.only_user(rows.name)
        if not Linear.matches(layer) or not one_launch_pays(_problem(graph, layer, image, dtype)):
            continue
        pooled = layer.with_inputs(x=node.inputs["x"]).with_attributes(pooled=True)
        graph.nodes[layer.name] = replace(pooled, source=joint_source(node, layer))
        del graph.nodes[node.name], graph.nodes[rows.name]


def _problem(graph: Graph, layer: Node, image: Shape, dtype: str) -> LinearProblem:
    batch, _, height, width = image
    assert isinstance(batch, int) and isinstance(height, int) and isinstance(width, int)
    outputs, features = graph.constants[layer.inputs["weight"]].shape
    return problem_from(
        LinearProblem, layer,
        batch=batch, in_features=features, out_features=outputs, dtype=unquantized(dtype),
        pixels=height * width,
    )  # fmt: skip
