"""Convolutions of few channels and filters, with their ReLU and pool, as one step that reads the image as it comes."""

from __future__ import annotations

from dataclasses import replace

from escalade.engine.graph.graph import Graph, Node

MOST_CHANNELS = 4
"""Channels at most: beyond, a pixel's channels fill a load and the tensor cores, and an ordinary convolution is
faster."""
MOST_FILTERS = 32


def fuse_few_channels(graph: Graph) -> None:
    """[normalise →] conv2d (+ bias + ReLU) [→ max_pool2d] [→ ReLU], stride 1, what `fuse_stem` has left."""
    for node in graph:
        if node.op != "conv2d" or not _is_few_channels(graph, node):
            continue
        inputs, normalised = _as_it_comes(graph, node)
        graph.nodes[node.name] = replace(
            node,
            op="few_channels",
            inputs=inputs,
            attributes={
                "padding": node.attributes["padding"],
                "relu": node.attributes["relu"],
                "pool": 1,
                "ceil_mode": False,
                "normalised": normalised,
            },
        )
        _take_pool(graph, graph.nodes[node.name])


def _is_few_channels(graph: Graph, node: Node) -> bool:
    filters, channels = graph.constants[node.inputs["weight"]].shape[:2]
    return (
        channels <= MOST_CHANNELS
        and filters <= MOST_FILTERS
        and node.attributes["stride"] == (1, 1)
        and node.attributes["dilation"] == (1, 1)
        and node.attributes["groups"] == 1
        and not {"residual", "shortcut"} & node.inputs.keys()
    )


def _as_it_comes(graph: Graph, node: Node) -> tuple[dict[str, str], bool]:
    """Its inputs, and whether they do what a normalisation in front did: w (s x + t) is (w s) x, and a bias.

    Only where no filter reaches over the edge: what lies there is zero after the normalisation, not before. An image
    of several channels has to be put in order anyway, and is normalised on the way.
    """
    normalise = graph.nodes.get(node.inputs["x"])
    if normalise is None or normalise.op != "normalise" or graph.only_user(normalise.name) is not node:
        return dict(node.inputs), False
    weight = graph.constants[node.inputs["weight"]].double()
    if weight.shape[1] != 1 or node.attributes["padding"] != (0, 0):
        return dict(node.inputs), False
    scale, shift = (graph.constants[normalise.inputs[role]].double() for role in ("scale", "shift"))
    bias = weight.sum((1, 2, 3)) * shift
    if "bias" in node.inputs:
        bias = bias + graph.constants[node.inputs["bias"]].double()
    inputs = {
        "x": normalise.inputs["x"],
        "weight": graph.add_constant(f"{node.name}_weight", (weight * scale).float()),
    }
    if "bias" in node.inputs or bool(bias.any()):
        inputs["bias"] = graph.add_constant(f"{node.name}_bias", bias.float())
    del graph.nodes[normalise.name]
    return inputs, True


def _take_pool(graph: Graph, node: Node) -> None:
    """The largest of ReLUs is the ReLU of the largest, so either may come first."""
    pool = graph.only_user(node.name)
    if pool is None or not _poolable(pool):
        return
    pooled = node.with_attributes(pool=pool.attributes["kernel"][0], ceil_mode=pool.attributes["ceil_mode"])
    sources = ", ".join(source for source in (node.source, pool.source) if source)
    graph.nodes[node.name] = replace(pooled, shape=pool.shape, source=sources)
    graph.remove(pool, instead=node.name)
    relu = graph.only_user(node.name)
    if relu is not None and relu.op == "relu" and relu.attributes["limit"] is None:
        graph.nodes[node.name] = graph.nodes[node.name].with_attributes(relu=True)
        graph.remove(relu, instead=node.name)


def _poolable(pool: Node) -> bool:
    """Whether the windows are square and side by side."""
    attributes = pool.attributes
    return (
        pool.op == "max_pool2d"
        and attributes["kernel"] == attributes["stride"]
        and attributes["kernel"][0] == attributes["kernel"][1] > 1
        and attributes["padding"] == (0, 0)
    )
