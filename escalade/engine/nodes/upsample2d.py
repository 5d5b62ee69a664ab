"""Resizing of images and its gradient, and the filter sums that convolutions of upsampled images need."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from escalade.engine.graph.graph import Graph, Node, Shape
from escalade.engine.nodes.base import AtenCall, Match, Operator, Tensors, match_aten
from escalade.engine.nodes.lowering import Forms, Lowered, image_problem
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
    is_tuple,
    one_of,
    pair,
)
from escalade.ops.filter_sums import FILTER_SUMS, FilterSumsProblem, summed
from escalade.ops.upsample2d import MODES, UPSAMPLE2D, Upsample2dProblem, fits, gradient, resized, step_of
from escalade.ops.upsample2d_backward import UPSAMPLE2D_BACKWARD, Upsample2dBackwardProblem

_MODES = {
    "upsample_nearest2d": "nearest",
    "_upsample_nearest_exact2d": "nearest_exact",
    "upsample_bilinear2d": "bilinear",
    "upsample_bicubic2d": "bicubic",
}
"""Modes by the names of PyTorch's operators."""


def _are_factors(value: Any) -> bool:
    return is_tuple(value, 2, lambda factor: is_real(factor) and factor >= 0)


def _arguments(node: Node) -> tuple[Any, ...]:
    return tuple(node.attributes[key] for key in ("mode", "corners", "factors"))


class Upsample2d(Operator):
    """Images resized as PyTorch does it, in the modes of MODES."""

    name = "upsample2d"
    preferred_layout = None
    computes_in_fp32 = True
    signature = Signature(
        {"x": IMAGE},
        {
            "output": pair(1),
            "mode": one_of(*MODES),
            "corners": FLAG,
            "factors": Attribute("two numbers of at least 0", _are_factors),
        },
    )

    @match_aten(*_MODES)
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        x = call.value("input") or call.value("self")
        if x is None or not node.is_floating:
            return None
        mode, corners = _MODES[node.calls], bool(call("align_corners", False))
        given = call("scale_factors") or (call("scales_h"), call("scales_w"))
        output = node.shape[2:]
        factors = _needed_factors(graph.shape_of(x)[2:], output, corners, given)
        return self.instead_of(node, {"x": x}, output=output, mode=mode, corners=corners, factors=factors)

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return resized(inputs["x"], node.attributes["output"], *_arguments(node))

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        image, output, factors = sizes["x"][2:], attributes["output"], attributes["factors"]
        if not all(fits(*one) for one in zip(image, output, factors, strict=True)):
            raise SizeError(f"factors {list(factors)} do not resize {list(image)} to {list(output)}")
        return {RESULT: (*sizes["x"][:2], *output)}

    def lower(self, node: Node, forms: Forms) -> Lowered:
        form = forms.value(node.inputs["x"])
        return Lowered(UPSAMPLE2D, image_problem(Upsample2dProblem, node, form, forms.stored))


def _needed_factors(
    sizes: Shape, outputs: Shape, corners: bool, given: Sequence[float | None]
) -> tuple[float, ...]:
    """Return the scale factors for height and width; 0 where the shapes alone give the same fp32 coordinates."""

    def needed(size: int, output: int, factor: float) -> float:
        steps = (struct.pack("f", step_of(size, output, corners, one)) for one in (factor, 0.0))
        return 0.0 if len({*steps}) == 1 else float(factor)

    found = zip(sizes, outputs, given, strict=True)
    return tuple(needed(size, output, factor or 0.0) for size, output, factor in found)  # type: ignore[arg-type]


class Upsample2dBackward(Operator):
    """dx of y = upsample2d(x), from the gradient of y."""

    name = "upsample2d_backward"
    computes_in_fp32 = True
    values = ("gradient",)

    @match_aten(*(f"{name}_backward" for name in _MODES))
    def _match(self, node: Node, call: AtenCall, graph: Graph) -> Match:
        y = call.value("grad_output")
        if y is None or not node.is_floating:
            return None
        mode = _MODES[node.calls.removesuffix("_backward")]
        corners, output = bool(call("align_corners", False)), graph.shape_of(y)[2:]
        factors = _needed_factors(node.shape[2:], output, corners, (call("scales_h"), call("scales_w")))
        return self.instead_of(
            node, {"gradient": y}, output=output, mode=mode, corners=corners, factors=factors
        )

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return gradient(inputs["gradient"], torch.Size(node.shape), *_arguments(node))  # type: ignore[arg-type]

    def lower(self, node: Node, forms: Forms) -> Lowered:
        form = forms.value(node.name)
        forward = image_problem(Upsample2dProblem, node, form, forms.stored, layout="nhwc")
        return Lowered(UPSAMPLE2D_BACKWARD, Upsample2dBackwardProblem(forward))


class FilterSums(Operator):
    """Flipped filters, summed over windows of 2×2 taps, with input and output channels swapped.

    With `zeros` around the filters, these are the filters for an image upsampled by 2, applied to the small image.
    Without, it is the gradient of the filters from that of such sums.
    """

    name = "filter_sums"

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return summed(inputs["x"], node.attributes["zeros"])

    def lower(self, node: Node, forms: Forms) -> Lowered:
        form = forms.value(node.inputs["x"])
        return Lowered(FILTER_SUMS, image_problem(FilterSumsProblem, node, form, forms.stored, layout="nhwc"))
