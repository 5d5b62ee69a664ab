"""The first convolution of an image network, with its pool, as one step that reads the image as it comes."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from escalade.engine.graph.forms import NAMES
from escalade.engine.graph.graph import Graph, Input, Node
from escalade.engine.nodes.base import Operator, Tensors, activate, activation_of
from escalade.engine.nodes.conv2d import Conv2d, has_one_input
from escalade.engine.nodes.lowering import FP32, Forms, Lowered
from escalade.engine.nodes.max_pool2d import MaxPool2d
from escalade.engine.nodes.normalise import Normalise, normalised
from escalade.ops.stem import STEM, StemProblem

DTYPES = ("fp16", "bf16", "fp8")
MOST_CHANNELS = 4
MOST_FILTER_WIDTH = 8


class Stem(Operator):
    """normalise → conv2d (+ bias + activation) → max_pool2d of a graph input; the first and the last are optional."""

    name = "stem"

    def fuse(self, graph: Graph, dtype: str) -> None:
        if dtype in DTYPES:
            fuse_stem(graph)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        y = F.conv2d(normalised(inputs), inputs["weight"], inputs["bias"], a["stride"], a["padding"])
        y = activate(node, y)
        return F.max_pool2d(y, *a["pool"]) if a["pool"] else y

    def lower(self, node: Node, forms: Forms) -> Lowered:
        image = forms.value(node.inputs["x"])
        batch, channels, height, width = image.shape
        filters, _, filter_height, filter_width = forms.constant(node.inputs["weight"])
        a = node.attributes
        problem = StemProblem(
            batch, channels, height, width, filters, filter_height, filter_width, a["stride"], a["padding"],
            source=NAMES[image.dtype], source_layout=image.layout, normalise="scale" in node.inputs,
            pool=a["pool"], dtype=forms.dtype, layout="nhwc", **activation_of(node),
        )  # fmt: skip
        return Lowered(STEM, problem, {"scale": FP32, "shift": FP32})

    def takes_image_as_it_comes(self, node: Node, image: Input) -> bool:
        return True

    def takes_image_type(self, dtype: torch.dtype, storage: torch.dtype) -> bool:
        return True

    def normalises(self, node: Node) -> bool:
        return "scale" in node.inputs


def fuse_stem(graph: Graph) -> None:
    """Every convolution of a graph input that the kernels can take becomes a stem, with what stands around it."""
    given = {entry.name for entry in graph.inputs}
    for node in graph:
        if not Conv2d.matches(node) or not _is_stem(graph, node):
            continue
        image, normalise = node.inputs["x"], graph.nodes.get(node.inputs["x"])
        inputs = dict(node.inputs)
        if Normalise.matches(normalise):
            if graph.only_user(normalise.name) is not node:
                continue
            image = normalise.inputs["x"]
            inputs |= {"scale": normalise.inputs["scale"], "shift": normalise.inputs["shift"]}
        if image not in given:
            continue
        stem = Stem.instead_of(
            node,
            {**inputs, "x": image},
            stride=node.attributes["stride"],
            padding=node.attributes["padding"],
            pool=None,
            **activation_of(node),
        )
        pool = graph.only_user(node.name)
        if MaxPool2d.matches(pool) and _poolable(pool):
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
        and has_one_input(node)
    )


def _poolable(pool: Node) -> bool:
    attributes = pool.attributes
    return (
        not attributes["ceil_mode"]
        and attributes["dilation"] == (1, 1)
        and all(len(set(attributes[key])) == 1 for key in ("kernel", "stride", "padding"))
        and (attributes["kernel"][0], attributes["stride"][0], attributes["padding"][0])
        in ((3, 2, 1), (2, 2, 0))
    )
