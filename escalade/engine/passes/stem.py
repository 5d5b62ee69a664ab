"""The first convolution of an image network, with its pool, as one step that reads the image as it comes."""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node

MOST_CHANNELS = 4
MOST_FILTER_WIDTH = 8


def fuse_stem(graph: Graph) -> None:
    """normalise → conv2d (+ bias + ReLU) → max_pool2d of a graph input; the first and the last are optional."""
    given = {entry.name for entry in graph.inputs}
    for node in graph:
        if node.op != "conv2d" or not _is_stem(graph, node):
            continue
        image, normalise = node.inputs["x"], graph.nodes.get(node.inputs["x"])
        inputs = dict(node.inputs)
        if normalise is not None and normalise.op == "normalise":
            if graph.only_user(normalise.name) is not node:
                continue
            image = normalise.inputs["x"]
            inputs |= {"scale": normalise.inputs["scale"], "shift": normalise.inputs["shift"]}
        if image not in given:
            continue
        stem = replace(
            node,
            op="stem",
            inputs={**inputs, "x": image},
            attributes={
                "stride": node.attributes["stride"],
                "padding": node.attributes["padding"],
                "relu": node.attributes["relu"],
                "pool": None,
                "conv_shape": node.shape,
            },
        )
        pool = graph.only_user(node.name)
        if pool is not None and _poolable(pool):
            window = tuple(pool.attributes[key][0] for key in ("kernel", "stride", "padding"))
            stem = replace(
                stem.with_attributes(pool=window),
                shape=pool.shape,
                source=", ".join((stem.source, pool.source)),
            )
            graph.nodes[node.name] = stem
            graph.remove(pool, instead=stem.name)
        else:
            graph.nodes[node.name] = stem


def _is_stem(graph: Graph, node: Node) -> bool:
    weight = graph.constants[node.inputs["weight"]]
    return (
        weight.shape[1] <= MOST_CHANNELS
        and weight.shape[3] <= MOST_FILTER_WIDTH
        and weight.shape[0] % 16 == 0
        and weight.shape[0] <= 128
        and node.attributes["groups"] == 1
        and node.attributes["dilation"] == (1, 1)
        and "bias" in node.inputs
        and not {"residual", "shortcut"} & node.inputs.keys()
    )


def _poolable(pool: Node) -> bool:
    attributes = pool.attributes
    return (
        pool.op == "max_pool2d"
        and not attributes["ceil_mode"]
        and all(len(set(attributes[key])) == 1 for key in ("kernel", "stride", "padding"))
        and (attributes["kernel"][0], attributes["stride"][0], attributes["padding"][0])
        in ((3, 2, 1), (2, 2, 0))
    )
