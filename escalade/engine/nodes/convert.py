"""Conversions between dtypes and layouts, image normalization, and quantization."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.engine.graph.forms import NAMES, Form
from escalade.engine.graph.graph import Node
from escalade.engine.nodes.base import Layouts, Operator, Tensors
from escalade.engine.nodes.lowering import FP32, Forms, Lowered
from escalade.engine.nodes.signature import IMAGE, VECTOR, Attributes, Signature, Sizes, vector_sizes
from escalade.ops.base.dtypes import DTYPES
from escalade.ops.convert import CONVERT, ConvertProblem
from escalade.ops.quantise import QUANTISE, QuantiseProblem

_ROW_PITCH = {"x": "stored_channels"}
"""Rows of a strided x are parts of larger rows of stored channels."""


class Convert(Operator):
    """An image in another dtype and layout, normalized and padded; or any value in the dtype that the model returns.

    Created by the layout pass.
    """

    name = "convert"
    mixes_types = True
    image_dtypes = None

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        """Normalize and pad; the caller converts dtype and layout."""
        if _is_flat(node):
            return inputs["x"]
        x = normalized(inputs)
        more = node.shape[1] - x.shape[1]  # type: ignore[operator]
        return F.pad(x, (0, 0, 0, 0, 0, more)) if more else x

    def may_alias(self, node: Node) -> bool:
        return True

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        source, target = forms.value(node.inputs["x"]), forms.value(node.name)
        if _is_flat(node):
            return _lower_cast(source, target.dtype)
        batch, channels, height, width = source.shape
        problem = ConvertProblem(
            batch, min(channels, target.shape[1]), height, width, NAMES[source.dtype], source.layout,
            NAMES[target.dtype], target.layout, target.shape[1], "scale" in node.inputs, channels,
        )  # fmt: skip
        pitches = {} if source.layout == "nchw" else _ROW_PITCH  # pixels of NCHW are contiguous
        return Lowered(CONVERT, problem, {"scale": FP32, "shift": FP32}, pitches=pitches)

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts(None, node.attributes["layout"])

    def is_alias(self, node: Node, forms: Forms) -> bool:
        source, target = forms.value(node.inputs["x"]), forms.value(node.name)
        if "scale" in node.inputs or source.dtype != target.dtype or source.shape != target.shape:
            return False
        is_one_channel_or_pixel = len(source.shape) == 4 and (
            source.shape[1] == 1 or math.prod(source.shape[2:]) == 1
        )
        return source.layout == target.layout or is_one_channel_or_pixel


def is_converted(source: torch.dtype, target: torch.dtype) -> bool:
    """Return True if a kernel converts between these dtypes."""
    return all(NAMES.get(dtype) in DTYPES for dtype in (source, target))


def _is_flat(node: Node) -> bool:
    """Return True if elements stay in place, in whichever shape."""
    return bool(node.attributes["layout"] == "flat")


def _lower_cast(form: Form, target: torch.dtype) -> Lowered | None:
    """Return a cast of contiguous rows; None if no kernel converts the dtypes."""
    if not is_converted(form.dtype, target) or not form.elements:
        return None
    problem = ConvertProblem(form.rows, form.row, 1, 1, NAMES[form.dtype], "nhwc", NAMES[target], "nhwc")
    return Lowered(CONVERT, problem, pitches=_ROW_PITCH)


class Normalize(Operator):
    """y = x * scale + shift per channel of an input image, for `compile(..., normalize=)`.

    Fused into the layer that reads the image, or into its conversion.
    """

    name = "normalise"
    signature = Signature({"x": IMAGE, "scale": VECTOR, "shift": VECTOR}, {})

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return normalized(inputs)

    def sizes(self, sizes: Mapping[str, Sizes], attributes: Attributes) -> Mapping[str, Sizes]:
        return vector_sizes(sizes, axis=1)


def normalized(inputs: Tensors) -> torch.Tensor:
    """Apply scale and shift to the image x, if there are any."""
    if "scale" not in inputs:
        return inputs["x"]
    scale, shift = (inputs[role].view(1, -1, 1, 1) for role in ("scale", "shift"))
    return inputs["x"] * scale + shift


class Quantize(Operator):
    """y = x * factor, stored in the quantized dtype `store`; created by the quantization pass."""

    name = "quantise"

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        return inputs["x"] * inputs["factor"]

    def lower(self, node: Node, forms: Forms) -> Lowered:
        form = forms.value(node.inputs["x"])
        problem = QuantiseProblem(math.prod(form.shape), NAMES[form.dtype], output=node.attributes["store"])
        return Lowered(QUANTISE, problem, {"factor": FP32})
