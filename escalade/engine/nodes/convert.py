"""A conversion from one type and layout to another, with normalising and padding on the way; made by the layout
pass."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F

from escalade.engine.graph.forms import NAMES, Form
from escalade.engine.graph.graph import Node
from escalade.engine.nodes.base import Layouts, Operator, Tensors
from escalade.engine.nodes.lowering import FP32, Forms, Lowered
from escalade.engine.nodes.normalise import normalised
from escalade.ops.base.dtypes import DTYPES
from escalade.ops.convert import CONVERT, ConvertProblem


class Convert(Operator):
    """An image in the order and the type that its readers want, or what is no image in the type that the model
    returns."""

    name = "convert"
    mixes_types = True

    def compute(self, node: Node, inputs: Tensors) -> torch.Tensor:
        """Types and layouts are the caller's business; what is left is normalising and padding."""
        if _is_as_it_lies(node):
            return inputs["x"]
        x = normalised(inputs)
        more = node.shape[1] - x.shape[1]  # type: ignore[operator]
        return F.pad(x, (0, 0, 0, 0, 0, more)) if more else x

    def may_share(self, node: Node) -> bool:
        return True

    def lower(self, node: Node, forms: Forms) -> Lowered | None:
        source, target = forms.value(node.inputs["x"]), forms.value(node.name)
        if _is_as_it_lies(node):
            return _copied(source, target.dtype)
        batch, channels, height, width = source.shape
        problem = ConvertProblem(
            batch, min(channels, target.shape[1]), height, width, NAMES[source.dtype], source.layout,
            NAMES[target.dtype], target.layout, target.shape[1], "scale" in node.inputs, channels,
        )  # fmt: skip
        apart = {} if source.layout == "nchw" else _APART  # whose pixels lie one behind the other
        return Lowered(CONVERT, problem, {"scale": FP32, "shift": FP32}, pitches=apart)

    def takes_image_type(self, dtype: torch.dtype, storage: torch.dtype) -> bool:
        return True

    def layouts(self, node: Node, given: Mapping[str, str]) -> Layouts:
        return Layouts(None, node.attributes["layout"])

    def is_alias(self, node: Node, forms: Forms) -> bool:
        """Whether the conversion changes nothing in memory."""
        source, target = forms.value(node.inputs["x"]), forms.value(node.name)
        if "scale" in node.inputs or source.dtype != target.dtype or source.shape != target.shape:
            return False
        one_channel_or_pixel = len(source.shape) == 4 and (
            source.shape[1] == 1 or math.prod(source.shape[2:]) == 1
        )
        return source.layout == target.layout or one_channel_or_pixel

    def normalises(self, node: Node) -> bool:
        return "scale" in node.inputs

    def stored_type(self, node: Node, storage: torch.dtype, is_output: bool) -> torch.dtype:
        return getattr(torch, node.dtype) if is_output else super().stored_type(node, storage, is_output)


def is_converted(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether a kernel makes values of one type those of another."""
    return all(NAMES.get(dtype) in DTYPES for dtype in (source, target))


def _is_as_it_lies(node: Node) -> bool:
    """Whether each element is at its place, however many dimensions there are."""
    return bool(node.attributes["layout"] == "flat")


def _copied(form: Form, target: torch.dtype) -> Lowered | None:
    """Rows of what lies innermost, whatever the dimensions; None for types that no kernel copies."""
    if not is_converted(form.dtype, target) or not form.elements:
        return None
    problem = ConvertProblem(form.rows, form.row, 1, 1, NAMES[form.dtype], "nhwc", NAMES[target], "nhwc")
    return Lowered(CONVERT, problem, pitches=_APART)


_APART = {"x": "stored_channels"}
"""Rows of x that lie apart are parts of so many channels that are stored."""
