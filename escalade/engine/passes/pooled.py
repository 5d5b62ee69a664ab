"""The mean over an image and the linear layer behind it as one step, at batch sizes for which one launch pays."""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node, Shape
from escalade.ops.linear import LinearProblem
from escalade.ops.linear.rungs.pooled import one_launch_pays


def fuse_pooled(graph: Graph, dtype: str) -> None:
    """adaptive_avg_pool2d to one pixel → reshape to rows → linear, in a graph whose sizes are numbers.

    The layer reads what the pool read, which lies in NHWC; it runs where it did.
    """
    for node in graph:
        if node.op != "adaptive_avg_pool2d" or node.attributes["output"] != (1, 1):
            continue
        image = graph.shape_of(node.inputs["x"])
        rows = graph.only_user(node.name)
        if rows is None or rows.op != "reshape" or rows.shape != image[:2]:
            continue
        layer = graph.only_user(rows.name)
        if layer is None or layer.op != "linear" or not _pays(graph, layer, image, dtype):
            continue
        sources = ", ".join(source for source in (node.source, layer.source) if source)
        pooled = layer.with_inputs(x=node.inputs["x"]).with_attributes(pooled=True)
        graph.nodes[layer.name] = replace(pooled, source=sources)
        del graph.nodes[node.name], graph.nodes[rows.name]


def _pays(graph: Graph, layer: Node, image: Shape, dtype: str) -> bool:
    batch, _, height, width = image
    assert isinstance(batch, int) and isinstance(height, int) and isinstance(width, int)
    outputs, features = graph.constants[layer.inputs["weight"]].shape
    stored = "fp16" if dtype == "fp8" else dtype
    problem = LinearProblem(
        batch,
        features,
        outputs,
        "bias" in layer.inputs,
        layer.attributes["relu"],
        stored,
        pixels=height * width,
    )
    return one_launch_pays(problem)
