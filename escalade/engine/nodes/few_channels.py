"""Convolutions of few channels and filters, with their ReLU and pool, as one step that reads the image as it comes."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from escalade.engine.graph.forms import NAMES
from escalade.engine.graph.graph import Graph, Input, Node
from escalade.engine.nodes.base import Operator, Tensors, activate, activation_of
from escalade.engine.nodes.conv2d import Conv2d, has_one_input
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.max_pool2d import MaxPool2d
from escalade.engine.nodes.normalise import Normalise
from escalade.engine.nodes.relu import Relu
from escalade.ops.few_channels import FEW_CHANNELS
from escalade.ops.few_channels.problem import FewChannelsProblem

MOST_CHANNELS = 4
"""Channels at most: beyond, a pixel's channels fill a load and the tensor cores, and an ordinary convolution is
faster."""
MOST_FILTERS = 32


class FewChannels(Operator):
    """[normalise →] conv2d (+ bias + activation) [→ max_pool2d] [→ ReLU], stride 1, what the stem has left."""

    name = "few_channels"

    def fuse(self, graph: Graph, dtype: str) -> None:
        fuse_few_channels(graph)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        y = F.conv2d(inputs["x"], inputs["weight"], inputs.get("bias"), padding=a["padding"])
        y = activate(node, y)
        return F.max_pool2d(y, a["pool"], ceil_mode=a["ceil_mode"]) if a["pool"] > 1 else y

    def lower(self, node: Node, forms: Forms) -> Lowered:
        image = forms.value(node.inputs["x"])
        batch, channels, height, width = image.shape
        filters, _, filter_height, filter_width = forms.constant(node.inputs["weight"])
        a = node.attributes
        problem = FewChannelsProblem(
            batch, channels, height, width, filters, filter_height, filter_width, a["padding"],
            "bias" in node.inputs, pool=a["pool"], ceil_mode=a["ceil_mode"], dtype=forms.dtype, layout="nhwc",
            source=NAMES[image.dtype], **activation_of(node),
        )  # fmt: skip
        return Lowered(FEW_CHANNELS, problem)

    def takes_image_as_it_comes(self, node: Node, image: Input) -> bool:
        return image.shape[1] == 1  # with one channel every layout is the same

    def takes_image_type(self, dtype: torch.dtype, storage: torch.dtype) -> bool:
        return dtype in (storage, torch.float32, torch.uint8)

    def normalises(self, node: Node) -> bool:
        return node.attributes["normalised"]


def fuse_few_channels(graph: Graph) -> None:
    """Every convolution that is small enough becomes one of few channels, with what stands around it."""
    for node in graph:
        if not Conv2d.matches(node) or not _is_few_channels(graph, node):
            continue
        inputs, normalised = _as_it_comes(graph, node)
        graph.nodes[node.name] = FewChannels.instead_of(
            node,
            inputs,
            padding=node.attributes["padding"],
            pool=1,
            ceil_mode=False,
            normalised=normalised,
            **activation_of(node),
        )
        if not node.attributes.get("activation"):  # the largest of others is not that of the largest
            _take_pool(graph, graph.nodes[node.name])


def _is_few_channels(graph: Graph, node: Node) -> bool:
    filters, channels = graph.constants[node.inputs["weight"]].shape[:2]
    return (
        channels <= MOST_CHANNELS
        and filters <= MOST_FILTERS
        and node.attributes["stride"] == (1, 1)
        and node.attributes["dilation"] == (1, 1)
        and node.attributes["groups"] == 1
        and has_one_input(node)
    )


def _as_it_comes(graph: Graph, node: Node) -> tuple[dict[str, str], bool]:
    """The inputs of a node, and whether they do what a normalisation in front did: w (s x + t) is (w s) x, and a bias.

    Only where no filter reaches over the edge: what lies there is zero after the normalisation, not before. An image
    of several channels has to be put in order anyway, and is normalised on the way.
    """
    normalise = graph.nodes.get(node.inputs["x"])
    if not Normalise.matches(normalise) or graph.only_user(normalise.name) is not node:
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
    if not MaxPool2d.matches(pool) or not _poolable(pool):
        return
    pooled = node.with_attributes(pool=pool.attributes["kernel"][0], ceil_mode=pool.attributes["ceil_mode"])
    sources = ", ".join(source for source in (node.source, pool.source) if source)
    graph.nodes[node.name] = replace(pooled, shape=pool.shape, source=sources)
    graph.remove(pool, instead=node.name)
    relu = graph.only_user(node.name)
    if Relu.matches(relu) and relu.attributes["limit"] is None:
        graph.nodes[node.name] = graph.nodes[node.name].with_attributes(relu=True)
        graph.remove(relu, instead=node.name)


def _poolable(pool: Node) -> bool:
    """Whether the windows are square and side by side."""
    attributes = pool.attributes
    return (
        attributes["kernel"] == attributes["stride"]
        and attributes["kernel"][0] == attributes["kernel"][1] > 1
        and attributes["padding"] == (0, 0)
        and attributes["dilation"] == (1, 1)
    )
