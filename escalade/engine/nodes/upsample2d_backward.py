"""The gradient of an image that was brought to another size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import torch

from escalade.engine.graph.graph import Graph, Node, Reference, Shape
from escalade.engine.nodes.aten import Aten
from escalade.engine.nodes.aten_call import AtenCall
from escalade.engine.nodes.avg_pool2d import AvgPool2d
from escalade.engine.nodes.base import Operator, Recognised, Recogniser, Tensors
from escalade.engine.nodes.conv2d import Conv2d
from escalade.engine.nodes.conv2d_input_gradient import Conv2dInputGradient
from escalade.engine.nodes.gradients import put_in_order, through_relu
from escalade.engine.nodes.lowering import Forms, Lowered
from escalade.engine.nodes.upsample2d import MODE_OF, needed_factors
from escalade.ops.expressions import Expression
from escalade.ops.upsample2d import Upsample2dProblem
from escalade.ops.upsample2d.reference import gradient as of_input
from escalade.ops.upsample2d_backward import UPSAMPLE2D_BACKWARD, Upsample2dBackwardProblem

_TWICE = (2, 2)
_MASKED = Expression.parse("where(residual <= 0, 0, x)")
"""The backward pass of a ReLU whose result is the residual."""


class Upsample2dBackward(Operator):
    """dx of y = upsample2d(x), from the gradient of y."""

    name = "upsample2d_backward"
    computes_in_fp32 = True
    values = ("gradient",)

    @property
    def captured(self) -> Mapping[str, Recogniser]:
        return {f"{name}_backward": partial(self._recognise, mode) for name, mode in MODE_OF.items()}

    def _recognise(self, mode: str, node: Node, call: AtenCall, graph: Graph) -> Recognised:
        gradient = call.value("grad_output")
        if gradient is None or not node.is_floating:
            return None
        corners = bool(call("align_corners", False))
        output = graph.shape_of(gradient)[2:]
        factors = needed_factors(node.shape[2:], output, corners, (call("scales_h"), call("scales_w")))
        return self.instead_of(
            node, {"gradient": gradient}, output=output, mode=mode, corners=corners, factors=factors
        )

    def fuse_step(self, graph: Graph) -> None:
        """Takes the gradient of a convolution's input in front of it, and a ReLU's backward pass behind it.

        Where each pixel was repeated, what is summed up is the convolution's gradient by filters that are summed up
        beforehand, at every other pixel: fewer products, and the large image is never written.
        """
        for node in graph:
            large = graph.nodes.get(node.inputs["gradient"]) if self.matches(node) else None
            if not Conv2dInputGradient.matches(large) or graph.only_user(large.name) is not node:
                continue
            filters = graph.shape_of(large.inputs["weight"])[2:]
            if not _repeats(node) or not _is_dense(large, filters):
                continue
            behind = through_relu(node, graph)
            place, mask = behind if behind is not None else (node, None)
            small = Conv2d.instead_of(
                replace(place, source=node.source),
                {"x": large.inputs["gradient"], "weight": _summed(large, graph), "residual": mask},
                stride=_TWICE, padding=_around(large, filters), dilation=(1, 1), groups=1, relu=False,
            )  # fmt: skip
            graph.nodes[place.name] = Conv2d().applying(small, _MASKED) if mask else small
            for gone in {large.name, node.name} - {place.name}:
                del graph.nodes[gone]
            put_in_order(graph)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        a = node.attributes
        return of_input(inputs["gradient"], torch.Size(node.shape), a["mode"], a["corners"], a["factors"])  # type: ignore[arg-type]

    def lower(self, node: Node, forms: Forms) -> Lowered:
        a = node.attributes
        batch, channels, height, width = forms.value(node.name).shape
        forward = Upsample2dProblem(
            batch, channels, height, width, a["output"], a["mode"], a["corners"], a["factors"], forms.stored, "nhwc"
        )  # fmt: skip
        return Lowered(UPSAMPLE2D_BACKWARD, Upsample2dBackwardProblem(forward))


def _repeats(node: Node) -> bool:
    """Whether an image was made twice as large by its nearest pixels."""
    a = node.attributes
    sizes = [(2 * size, 2.0) for size in node.shape[2:]]  # type: ignore[operator]
    found = zip(a["output"], a["factors"], strict=True)
    return a["mode"] == "nearest" and all(
        output == wanted and factor in (0.0, twice)
        for (output, factor), (wanted, twice) in zip(found, sizes, strict=True)
    )


def _is_dense(gradient: Node, filters: Shape) -> bool:
    """Whether a convolution has one filter of more than a pixel for all of the image, and reads each pixel by it."""
    a = gradient.attributes
    return (
        (a["stride"], a["dilation"], a["groups"]) == ((1, 1), (1, 1), 1)
        and "mask" not in gradient.inputs
        and all(
            size > 1 and padding < size  # type: ignore[operator]
            for size, padding in zip(filters, a["padding"], strict=True)
        )
    )


def _around(gradient: Node, filters: Shape) -> tuple[int, int]:
    """The padding of the convolution that a gradient is, by the filters turned around."""
    padding = gradient.attributes["padding"]
    down, along = (size - 1 - own for size, own in zip(filters, padding, strict=True))  # type: ignore[operator]
    return down, along


def _summed(gradient: Node, graph: Graph) -> str:
    """Filters turned around, of which each pixel is a sum of up to four, with channels in the place of filters."""
    weight = gradient.inputs["weight"]
    filters, channels, height, width = graph.shape_of(weight)
    size = height + 1, width + 1  # type: ignore[operator]
    dtype = str(graph.dtype_of(weight)).removeprefix("torch.")
    sums = AvgPool2d.node(
        graph.fresh(f"{gradient.name}_sums"), {"x": weight},
        {"kernel": _TWICE, "stride": (1, 1), "padding": (1, 1), "ceil_mode": False, "count_padding": True,
         "divisor": 1},
        (filters, channels, *size), dtype,
    )  # fmt: skip
    turned = _pytorchs("flip", graph.fresh(f"{gradient.name}_turned"), sums, (2, 3), sums.shape)
    swapped = _pytorchs(
        "permute", graph.fresh(f"{gradient.name}_filters"), turned, (1, 0, 2, 3), (channels, filters, *size)
    )
    for node in (sums, turned, swapped.with_attributes(layout="nhwc")):
        graph.append(node)
    return swapped.name


def _pytorchs(name: str, value: str, of: Node, dims: tuple[int, ...], shape: Shape) -> Node:
    """A call of one of PyTorch's operators over dimensions."""
    arguments = {"self": Reference("in0"), "dims": dims}
    attributes = {"target": f"aten::{name}", "arguments": arguments}
    return Aten.node(value, {"in0": of.name}, attributes, shape, of.dtype)
