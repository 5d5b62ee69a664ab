"""An image at another size, by its nearest pixels or between several."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from escalade.engine.graph.graph import Graph, Node, Shape
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.base import Layouts, Operator, Recognised, Recogniser, Tensors, with_channels
from escalade.engine.nodes.conv2d import Conv2d, has_one_input
from escalade.engine.nodes.conv2d_weight_gradient import Conv2dWeightGradient
from escalade.engine.nodes.conv_transpose2d import ConvTranspose2d
from escalade.engine.nodes.gradients import put_in_order
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.reduce import Reduce
from escalade.engine.nodes.repeated import TWICE, around, is_dense, is_repeated, summed, unsummed
from escalade.engine.nodes.side_outputs import Further, furthers_of
from escalade.engine.nodes.signature import (
    FLAG,
    IMAGE,
    RESULT,
    Attribute,
    Attributes,
    Signature,
    SizeError,
    Sizes,
    is_real,
    pair,
)
from escalade.ops.upsample2d import MODES, UPSAMPLE2D, Upsample2dProblem, fits, resized, step_of

MODE_OF = {
    "upsample_nearest2d": "nearest",
    "_upsample_nearest_exact2d": "nearest_exact",
    "upsample_bilinear2d": "bilinear",
    "upsample_bicubic2d": "bicubic",
}
"""The modes by the names of PyTorch's operators."""


def _are_factors(value: Any) -> bool:
    return type(value) is tuple and len(value) == 2 and all(is_real(one) and one >= 0 for one in value)


class Upsample2d(Operator):
    """Images at another size, as PyTorch makes them in the modes of MODES."""

    name = "upsample2d"
    computes_in_fp32 = True
    signature = Signature(
        {"x": IMAGE},
        {
            "output": pair(1),
            "mode": Attribute(f"one of {', '.join(MODES)}", lambda value: type(value) is str and value in MODES),
            "corners": FLAG,
            "factors": Attribute("two numbers of at least 0", _are_factors),
        },
    )  # fmt: skip

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {name: partial(self._recognise, mode) for name, mode in MODE_OF.items()}

    def _recognise(self, mode: str, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        x = call.value("input") or call.value("self")
        if x is None or not node.is_floating:
            return None
        given = call("scale_factors") or (call("scales_h"), call("scales_w"))
        corners = bool(call("align_corners", False))
        factors = needed_factors(graph.shape_of(x)[2:], node.shape[2:], corners, given)
        return self.instead_of(
            node, {"x": x}, output=node.shape[2:], mode=mode, corners=corners, factors=factors
        )

    def fuse_step(self, graph: Graph) -> None:
        """Leaves repeated pixels to the convolutions that read them, and to the gradients of their weights."""
        for node in graph:
            if not self.matches(node) or not is_repeated(node.attributes, graph.shape_of(node.inputs["x"])):
                continue
            readers = [one for one in graph if node.name in one.inputs.values() and not Further.matches(one)]
            if node.name in graph.outputs or not all(_takes_repeated(one, node, graph) for one in readers):
                continue
            for reader in readers:
                if Conv2d.matches(reader):
                    graph.nodes[reader.name] = _of_small(reader, node.inputs["x"], graph)
                else:
                    _gradient_of_small(reader, node.inputs["x"], graph)
            del graph.nodes[node.name]
            put_in_order(graph)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        return resized(inputs["x"], a["output"], a["mode"], a["corners"], a["factors"])

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        output, factors = attributes["output"], attributes["factors"]
        if not all(fits(*one) for one in zip(sizes["x"][2:], output, factors, strict=True)):
            raise SizeError(
                f"factors of {list(factors)} do not make {list(output)} of {list(sizes['x'][2:])}"
            )
        return {RESULT: (*sizes["x"][:2], *output)}

    def before_channels(self, node: Node, order: tuple[int, ...], channels: int, graph: Graph) -> Node | None:
        return with_channels(node, channels)

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts.of_all(given)

    def lower(self, node: Node, forms: Forms) -> Lowered:
        a = node.attributes
        form = forms.value(node.inputs["x"])
        batch, channels, height, width = form.shape
        problem = Upsample2dProblem(
            batch, channels, height, width, a["output"], a["mode"], a["corners"], a["factors"], forms.stored,
            form.layout,
        )  # fmt: skip
        return Lowered(UPSAMPLE2D, problem)


def needed_factors(
    sizes: Shape, outputs: Shape, corners: bool, given: Sequence[float | None]
) -> tuple[float, ...]:
    """The factors down and along by which places are found."""
    return tuple(
        _needed(size, output, corners, factor)  # type: ignore[arg-type]
        for size, output, factor in zip(sizes, outputs, given, strict=True)
    )


def _needed(size: int, outputs: int, corners: bool, factor: float | None) -> float:
    """A factor, or 0 where the sizes alone give the same places in fp32."""
    given, own = (struct.pack("f", step_of(size, outputs, corners, one)) for one in (factor or 0.0, 0.0))
    return 0.0 if given == own else float(factor or 0.0)


def _takes_repeated(reader: Node, node: Node, graph: Graph) -> bool:
    """Whether a reader is a convolution by weights that are values, or the gradient of such."""
    if [role for role, name in reader.inputs.items() if name == node.name] != ["x"]:
        return False
    if Conv2dWeightGradient.matches(reader):
        return is_dense(reader, reader.shape)
    weight = reader.inputs.get("weight", "")
    return (
        Conv2d.matches(reader)
        and weight not in graph.constants
        and has_one_input(reader)
        and is_dense(reader, graph.shape_of(weight))
    )


def _of_small(layer: Node, x: str, graph: Graph) -> Node:
    """A convolution of repeated pixels as one of the pixels themselves."""
    weight = layer.inputs["weight"]
    small = ConvTranspose2d.instead_of(
        layer, {"gradient": x, "weight": summed(weight, graph), "bias": layer.inputs.get("bias")},
        stride=TWICE, padding=around(layer, graph.shape_of(weight)), output_padding=(0, 0), dilation=(1, 1), groups=1,
        relu=False,
    )  # fmt: skip
    return ConvTranspose2d().applying(small, Conv2d().applied(layer))


def _gradient_of_small(layer: Node, x: str, graph: Graph) -> None:
    """Puts the gradient of summed filters in the place of that of filters over repeated pixels."""
    gradient = layer.inputs["gradient"]
    for further in furthers_of(layer, graph):
        graph.nodes[further.name] = Reduce.instead_of(
            further, {"x": gradient}, kind="sum", dims=(0, 2, 3), keepdim=False, correction=0, relu=False
        )
    filters, channels, height, width = layer.shape
    small = Conv2dWeightGradient.node(
        graph.fresh(f"{layer.name}_summed"), {"x": gradient, "gradient": x},
        {"stride": TWICE, "padding": around(layer, layer.shape), "dilation": (1, 1), "groups": 1, "bias": False},
        (channels, filters, height + 1, width + 1), layer.dtype,  # type: ignore[operator]
    )  # fmt: skip
    graph.nodes[layer.name] = replace(unsummed(small, layer.name, graph), source=layer.source)
